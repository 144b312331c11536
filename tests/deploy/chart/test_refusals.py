"""Values that cannot work are refused before anything is installed, by the name of the value."""

import json

import pytest

from tests.deploy.chart.rendering import CHART, helm_template
from tests.deploy.chart.service_options import PARSERS, definition

# By the schema: values as of --set-json, and what helm says.
BY_SCHEMA = [
    ('worker.tensorParallelSize=0', "'/worker/tensorParallelSize': minimum: got 0, want 1"),
    ('worker.tensorParallelSize="two"', "'/worker/tensorParallelSize'"),
    ('worker.replica=2', "'/worker': additional properties 'replica' not allowed"),
    ('worker.groups=[]', "'/worker/groups': minItems"),
    ('worker.groups=[{"replicas":2}]', "'/worker/groups/0': missing property 'name'"),
    ('worker.groups=[{"name":"A100"}]', "'/worker/groups/0/name'"),
    ('worker.groups=[{"name":"a","gpus":8}]', "'/worker/groups/0': additional properties 'gpus'"),
    ('worker.device="gpu"', "'/worker/device'"),
    ('worker.gpuResource="gpu"', "'/worker/gpuResource'"),
    ('worker.shmSize="1 GiB"', "'/worker/shmSize'"),
    ('worker.options={"max-num-seq":8}', "'/worker/options': additional properties 'max-num-seq'"),
    ('worker.options={"max-num-seqs":"many"}', "'/worker/options/max-num-seqs'"),
    ('worker.options={"dtype":"fp8"}', "'/worker/options/dtype'"),
    ('worker.options={"port":1}', "'/worker/options': additional properties 'port'"),
    ('worker.updateStrategy="Recreate"', "'/worker/updateStrategy'"),
    ('worker.resources.request={"cpu":1}', "'/worker/resources': additional properties 'request'"),
    ('worker.resources.requests={"memory":"3GB"}', "'/worker/resources/requests/memory'"),
    ('scheduler.replicas=2', "'/scheduler': additional properties 'replicas' not allowed"),
    ('scheduler.options={"policy":"lifo"}', "'/scheduler/options/policy'"),
    ('scheduler.drainSeconds=-1', "'/scheduler/drainSeconds'"),
    ('scheduler.standby=true', "'/scheduler/standby'"),
    ('scheduler.standby.delaySeconds=0', "'/scheduler/standby/delaySeconds'"),
    ('gateway.options={"api-key":"pw"}', "'/gateway/options': additional properties 'api-key'"),
    ('gateway.service.type="ExternalName"', "'/gateway/service/type'"),
    ('gateway.service.httpPort=80000', "'/gateway/service/httpPort'"),
    ('gateway.autoscaling.kind="vpa"', "'/gateway/autoscaling/kind'"),
    ('gateway.extraEnv=[{"name":"A B"}]', "'/gateway/extraEnv/0/name'"),
    ('worker.env={"A B":"1"}', "'/worker/env'"),
    ('gateway.image="pagewire gateway"', "'/gateway/image'"),
    ('model.source="ollama"', "'/model/source'"),
    ('model.hub.name="Qwen3"', "'/model/hub/name'"),
    ('model.s3.path="s3://bucket/model"', "'/model/s3/path'"),
    ('model.volume.path="../etc"', "'/model/volume/path'"),
    ('model.volume.source={"nfs":{},"emptyDir":{}}', "'/model/volume/source': maxProperties"),
    ('longestGenerationSeconds=0', "'/longestGenerationSeconds'"),
    ('listenAddress="localhost"', "'/listenAddress'"),
    ('listenAddress="[::]"', "'/listenAddress'"),
    ('tls.source="vault"', "'/tls/source'"),
    ('tls.certManager.duration="90d"', "'/tls/certManager/duration'"),
    ('networkPolicy.clients=[{"cidr":"0.0.0.0/0"}]', "'/networkPolicy/clients/0'"),
    ('gatewayAPI.enabled=true', "'/gatewayAPI/parentRefs': minItems"),
    ('monitoring.monitor="VMPodScrape"', "'/monitoring/monitor'"),
    ('monitoring.interval="15"', "'/monitoring/interval'"),
    ('fullnameOverride="a-name-that-is-longer-than-28-characters"', "'/fullnameOverride'"),
    ('gatway={}', "additional properties 'gatway' not allowed"),
]  # fmt: skip
# By the chart: values that are each fine and do not fit together.
TOGETHER = [
    ('model.source="hub"', "gateway.model.hub.name: empty, and source is hub"),
    ('model.source="s3"', "model.s3.path: empty"),
    ('model.source="volume"', "model.volume.source: empty"),
    ('model={"source":"volume","volume":{"source":{"emptyDir":{}}}}', "model.volume.shared:"),
    ('model.storage.kind="claim"', "model.storage.claim: empty"),
    ('worker.groups=[{"name":"a"},{"name":"a"}]', "worker.groups: two groups are named a"),
    ('worker.groups=[{"name":"a","model":{"source":"s3"}}]', "worker.groups (a) model.s3.path"),
    ('worker.autoscaling={"kind":"hpa","minReplicas":9}', "autoscaling.minReplicas: 9 is more"),
    ('gateway.autoscaling={"kind":"hpa","cpuPercent":0}', "neither cpuPercent nor waitingPerRep"),
    ('tls.mutual=true', "tls.mutual: needs tls.enabled"),
    ('tls={"enabled":true,"source":"secrets"}', "tls.secrets.gateway: empty"),
    ('tls.public.enabled=true', "tls.public.secret: empty"),
    ('apiKeys.secret="keys"', "test.apiKeySecret: empty"),
    ('peerToken.enabled=false,networkPolicy.enabled=false', "peerToken.enabled: false"),
    ('peerToken.enabled=false,apiKeys.operators=true', "apiKeys.operators: scheduler and workers"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "says"), BY_SCHEMA + TOGETHER, ids=lambda text: str(text)[:40])
def test_a_value_that_cannot_work_is_refused_by_name(given: str, says: str) -> None:
    done = helm_template("--set-json", given)
    assert done.returncode != 0
    assert says in done.stderr


def test_every_object_of_the_schema_is_closed() -> None:
    """But for those whose keys are Kubernetes' or the user's."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    parts = [schema, *schema["definitions"].values(), *schema["properties"].values()]
    opened = [
        part["properties"].keys()
        for part in parts
        if "properties" in part and part.get("additionalProperties") is not False
    ]
    assert opened == []


@pytest.mark.parametrize("tier", PARSERS)
def test_the_options_of_the_schema_are_those_of_the_service(tier: str) -> None:
    """`python -m tests.deploy.chart.service_options` writes them anew."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["definitions"][f"{tier}Options"] == definition(tier)
