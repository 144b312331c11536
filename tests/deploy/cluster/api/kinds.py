"""The kinds of objects that the stand-in for an API server keeps."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind, as discovery tells of it."""

    group: str
    version: str
    name: str
    plural: str
    is_namespaced: bool = True
    short_names: tuple[str, ...] = ()

    @property
    def api_version(self) -> str:
        """As objects have it."""
        return f"{self.group}/{self.version}".strip("/")

    @property
    def path(self) -> str:
        """Below which its objects are found."""
        return f"apis/{self.api_version}" if self.group else f"api/{self.version}"


def _kinds() -> Iterable[Kind]:
    core = (
        ("Pod", "pods", "po"), ("Service", "services", "svc"), ("Secret", "secrets", ""),
        ("ConfigMap", "configmaps", "cm"), ("ServiceAccount", "serviceaccounts", "sa"),
        ("PersistentVolumeClaim", "persistentvolumeclaims", "pvc"), ("Event", "events", "ev"),
    )  # fmt: skip
    for name, plural, short in core:
        yield Kind("", "v1", name, plural, True, (short,) if short else ())
    yield Kind("", "v1", "Namespace", "namespaces", False, ("ns",))
    yield Kind("scheduling.k8s.io", "v1", "PriorityClass", "priorityclasses", False)
    others = (
        ("apps/v1", "Deployment", "deployments"), ("apps/v1", "StatefulSet", "statefulsets"),
        ("apps/v1", "ReplicaSet", "replicasets"), ("batch/v1", "Job", "jobs"),
        ("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
        ("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers"),
        ("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
        ("networking.k8s.io/v1", "Ingress", "ingresses"),
        ("rbac.authorization.k8s.io/v1", "Role", "roles"),
        ("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings"),
        ("monitoring.coreos.com/v1", "ServiceMonitor", "servicemonitors"),
        ("monitoring.coreos.com/v1", "PodMonitor", "podmonitors"),
        ("monitoring.coreos.com/v1", "PrometheusRule", "prometheusrules"),
        ("keda.sh/v1alpha1", "ScaledObject", "scaledobjects"),
        ("cert-manager.io/v1", "Certificate", "certificates"),
        ("cert-manager.io/v1", "Issuer", "issuers"),
        ("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes"),
        ("gateway.networking.k8s.io/v1", "GRPCRoute", "grpcroutes"),
    )  # fmt: skip
    for api_version, name, plural in others:
        group, _, version = api_version.partition("/")
        yield Kind(group, version, name, plural)


KINDS = tuple(_kinds())
_BY_NAME = {kind.name: kind for kind in KINDS}
POD, SERVICE, SECRET, CONFIG_MAP = (
    _BY_NAME[name] for name in ("Pod", "Service", "Secret", "ConfigMap")
)
CLAIM, NAMESPACE = _BY_NAME["PersistentVolumeClaim"], _BY_NAME["Namespace"]
DEPLOYMENT, STATEFUL_SET = _BY_NAME["Deployment"], _BY_NAME["StatefulSet"]


def find(group: str, version: str, plural: str) -> Kind | None:
    """The kind of a request's path."""
    wanted = (group, version, plural)
    return next((k for k in KINDS if (k.group, k.version, k.plural) == wanted), None)
