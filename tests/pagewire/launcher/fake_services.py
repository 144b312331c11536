"""A checkout of services without a model, for tests of `pagewire up`.

Each fake writes its pid and its arguments to its folder, serves gRPC health, and behaves as the
environment variable FAKE says: "worker=die" or "gateway=mute", for example.
"""

import textwrap
from pathlib import Path

_SERVICE = """
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2_grpc

NAME = "{name}"
if NAME == "gateway":
    from pagewire.v1 import inference_pb2 as pb
    from pagewire.v1 import types_pb2

WORDS = ["The capital", " of Japan", " is Tokyo."]
arguments, words = {{}}, sys.argv[1:]
while words:  # a switch has no value, and is empty here
    name, equals, value = words.pop(0).partition("=")
    has_value = words and not words[0].startswith("--")
    arguments[name] = value if equals else words.pop(0) if has_value else ""
mood = dict(pair.split("=") for pair in os.environ.get("FAKE", "").split()).get(NAME, "")
is_first = not Path(NAME + ".json").exists()
child = subprocess.Popen(["sleep", "600"], start_new_session=True)  # as a rank does
own = {{k: v for k, v in os.environ.items() if k.startswith("PAGEWIRE_")}}
facts = {{"pids": [os.getpid(), child.pid], "arguments": arguments, "environ": own}}
Path(NAME + ".new").write_text(json.dumps(facts))
Path(NAME + ".new").rename(NAME + ".json")
print(f"the {{NAME}} speaks", flush=True)
if mood == "die" or (mood == "die-again" and not is_first):
    sys.exit("out of memory, for example")
if mood == "hang":
    time.sleep(600)


given = [os.environ.get("PAGEWIRE_" + name) for name in ("GATEWAY_API_KEY", "API_KEY")]
key = arguments.get("--api-key") or given[0] or given[1]


def check_key(context):
    given = dict(context.invocation_metadata()).get("authorization")
    if key and given != f"Bearer {{key}}":
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "no key")


def tokenize(request, context):
    check_key(context)
    if mood == "plain":
        problem = "messages: the model has no chat template: use a completion"
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
    return pb.TokenizeResponse(token_ids=[1])


def answer(request, context):
    check_key(context)
    if mood == "broken":
        context.abort(grpc.StatusCode.INTERNAL, "it broke")
    words = [""] if mood == "mute" else WORDS
    for word in words:
        delta = pb.OutputDelta(text=word, token_ids=[1])
        if word == words[-1]:
            delta.finish_reason = types_pb2.FINISH_REASON_STOP
        is_chat = isinstance(request, pb.ChatStreamRequest)
        yield (pb.ChatStreamResponse if is_chat else pb.GenerateStreamResponse)(delta=delta)


def inference():
    return grpc.method_handlers_generic_handler("pagewire.v1.InferenceService", {{
        "ChatStream": grpc.unary_stream_rpc_method_handler(
            answer, pb.ChatStreamRequest.FromString, pb.ChatStreamResponse.SerializeToString
        ),
        "GenerateStream": grpc.unary_stream_rpc_method_handler(
            answer, pb.GenerateStreamRequest.FromString, pb.GenerateStreamResponse.SerializeToString
        ),
        "Tokenize": grpc.unary_unary_rpc_method_handler(
            tokenize, pb.TokenizeRequest.FromString, pb.TokenizeResponse.SerializeToString
        ),
    }})


server = grpc.server(ThreadPoolExecutor(4))
if NAME == "gateway":
    server.add_generic_rpc_handlers((inference(),))
health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
server.add_insecure_port("127.0.0.1:" + arguments.get("--grpc-port", arguments.get("--port", "")))
server.start()
signal.signal(signal.SIGUSR1, lambda *_: os._exit(71))


def drain(number, frame):
    note("is asked to end")
    if mood == "busy":
        return
    time.sleep(0.2)
    note("ends")
    os._exit(0)


def note(what):
    with Path("ends").open("a") as ends:
        ends.write(NAME + " " + what + "\\n")


signal.signal(signal.SIGTERM, drain)
server.wait_for_termination()
"""

_DEFAULT_MODEL = """
import os, sys
print("making the model", file=sys.stderr)
if "default_model=die" in os.environ.get("FAKE", ""):
    sys.exit("no room on the disk")
print(os.getcwd() + "/model")
"""


def write_checkout(folder: Path) -> None:
    """Writes the fakes and a model folder to `folder`."""
    for module, name in (
        ("worker_svc", "worker"),
        ("scheduler_svc", "scheduler"),
        ("gateway", "gateway"),
    ):
        _write(folder / module / "__main__.py", _SERVICE.format(name=name))
    _write(folder / "default_model" / "__main__.py", _DEFAULT_MODEL)
    _write(folder / "model" / "config.json", "{}")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    (path.parent / "__init__.py").touch()  # or the real package, where one is on the path, wins
    path.write_text(textwrap.dedent(text))
