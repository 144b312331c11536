"""What `pagewire up` prints when all services are ready: how to go on."""

import shlex

from pagewire._terminal import Style
from pagewire.cli.launcher.identity import LocalIdentity
from pagewire.cli.options import API_KEY_VARIABLE

_BEARER = f'"authorization: Bearer ${API_KEY_VARIABLE}"'


def invitation(identity: LocalIdentity, model: str, style: Style) -> str:
    """Commands to copy, with the certificate and without the key."""
    settings = identity.settings
    host, http, rpc = settings.reachable_host, settings.http_port, settings.grpc_port
    turns = '[{"role": "user", "content": "Hello!"}]'
    target = "" if rpc == 50051 else f" --target {host}:{rpc}"
    key = f" -H {_BEARER}" if identity.needs_key else ""
    python_key = (
        f'__import__("os").environ["{API_KEY_VARIABLE}"]' if identity.needs_key else '"none"'
    )
    scheme, curl, grpcurl, chat, python = "http", "curl", "grpcurl -plaintext", "", "python"
    if identity.ca is not None:
        ca = shlex.quote(str(identity.ca))
        scheme, curl, grpcurl = "https", f"curl --cacert {ca}", f"grpcurl -cacert {ca}"
        chat, python = f" --tls --ca-cert {ca}", f"SSL_CERT_FILE={ca} python"
    return f"""
{style.bold("Ready.")} Ctrl-C stops everything. How to go on:

  pagewire chat{target}{chat}
  {curl} {scheme}://{host}:{http}/v1/chat/completions -H 'content-type: application/json'{key} \\
    -d '{{"messages": {turns}, "max_tokens": 64}}'
  {python} -c 'from openai import OpenAI; client = OpenAI(base_url="{scheme}://{host}:{http}/v1", \\
    api_key={python_key}); print(client.chat.completions.create(model="{model}", \\
    max_tokens=64, messages={turns}).choices[0].message.content)'
  {grpcurl}{key} \\
    -d '{{"messages": {turns}, "options": {{"sampling": {{"max_tokens": 64}}}}}}' \\
    {host}:{rpc} pagewire.v1.InferenceService/Chat
"""
