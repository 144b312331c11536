"""The text of `pagewire up` when all services are ready: how to go on."""

import shlex

from pagewire._channel import is_local
from pagewire._connection.environment import API_KEY
from pagewire._terminal import Style
from pagewire.cli.launcher.identity import LocalIdentity
from pagewire.cli.launcher.sample import SampleOutcome

READY = "Ready."  # begins the line by which who started `pagewire up` knows
_BEARER = f'"authorization: Bearer ${API_KEY}"'
_TURNS = '[{"role": "user", "content": "Hello!"}]'
_PROMPT = "Once upon a time"


def invitation(identity: LocalIdentity, model: str, outcome: SampleOutcome, style: Style) -> str:
    """Commands to copy, with the certificate and without the key."""
    lines = [*_key(identity), _command(identity, outcome.can_chat)]
    lines += _curl(identity, outcome.can_chat)
    lines += _python(identity, model, outcome.can_chat)
    lines += _grpcurl(identity, outcome.can_chat)
    steps = "\n  ".join(lines)
    return f"\n{style.bold(READY)} Ctrl-C stops everything. How to go on:\n\n  {steps}\n"


def _key(identity: LocalIdentity) -> list[str]:
    """Lines that give the others the key, where the user's shell does not have it."""
    if identity.key_file is not None:
        return [f"export {API_KEY}=$(cat {shlex.quote(str(identity.key_file))})"]
    if identity.needs_key and identity.api_key is None:
        return [f"export {API_KEY}=...  # one of the keys that the file is of"]
    return []


def _command(identity: LocalIdentity, can_chat: bool) -> str:
    settings = identity.settings
    target = f"{settings.reachable_host}:{settings.grpc_port}"
    options = "" if settings.grpc_port == 50051 else f" --target {target}"
    if identity.ca is not None:
        options += f" --tls --ca-cert {shlex.quote(str(identity.ca))}"
    elif identity.needs_key and not is_local(target):
        options += " --allow-insecure-key"
    if settings.grpc_port == 50051 and not is_local(target):
        options += f" --target {target}"
    return f"pagewire chat{options}" if can_chat else f"pagewire complete '{_PROMPT}'{options}"


def _curl(identity: LocalIdentity, can_chat: bool) -> list[str]:
    curl = "curl" if identity.ca is None else f"curl --cacert {shlex.quote(str(identity.ca))}"
    key = f" -H {_BEARER}" if identity.needs_key else ""
    route = "chat/completions" if can_chat else "completions"
    asked = f'"messages": {_TURNS}' if can_chat else f'"prompt": "{_PROMPT}"'
    return [
        f"{curl} {_url(identity)}/v1/{route} -H 'content-type: application/json'{key} \\",
        f"""  -d '{{{asked}, "max_tokens": 64}}'""",
    ]


def _python(identity: LocalIdentity, model: str, can_chat: bool) -> list[str]:
    python = (
        "python" if identity.ca is None else f"SSL_CERT_FILE={shlex.quote(str(identity.ca))} python"
    )
    key = f'__import__("os").environ["{API_KEY}"]' if identity.needs_key else '"none"'
    if can_chat:
        call = f'chat.completions.create(model="{model}", \\\n    max_tokens=64, messages={_TURNS})'
        shown = ".choices[0].message.content"
    else:
        call = f'completions.create(model="{model}", \\\n    max_tokens=64, prompt="{_PROMPT}")'
        shown = ".choices[0].text"
    return [
        f"{python} -c 'from openai import OpenAI; "
        f'client = OpenAI(base_url="{_url(identity)}/v1", \\',
        f"  api_key={key}); print(client.{call}{shown})'",
    ]


def _grpcurl(identity: LocalIdentity, can_chat: bool) -> list[str]:
    settings = identity.settings
    how = "-plaintext" if identity.ca is None else f"-cacert {shlex.quote(str(identity.ca))}"
    key = f" -H {_BEARER}" if identity.needs_key else ""
    asked = f'"messages": {_TURNS}' if can_chat else f'"prompt": {{"text": "{_PROMPT}"}}'
    method = "Chat" if can_chat else "Generate"
    return [
        f"grpcurl {how}{key} \\",
        f"""  -d '{{{asked}, "options": {{"sampling": {{"max_tokens": 64}}}}}}' \\""",
        f"  {settings.reachable_host}:{settings.grpc_port} pagewire.v1.InferenceService/{method}",
    ]


def _url(identity: LocalIdentity) -> str:
    scheme = "http" if identity.ca is None else "https"
    return f"{scheme}://{identity.settings.reachable_host}:{identity.settings.http_port}"
