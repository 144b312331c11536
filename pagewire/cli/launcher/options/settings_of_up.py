"""Settings that `pagewire up` takes from the environment and a file, beyond its own options.

The services inherit the environment and read their sections of the file themselves. What `up`
decides for them, it refuses there: it would have to ignore it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from pagewire.cli.launcher.options.up_options import SERVICES
from pagewire.cli.launcher.services import Settings
from pagewire.cli.options import CommandError
from pagewire.settings import config_file, environment
from pagewire.settings.known import OPTIONS

_TLS = ("tls-cert", "tls-key", "tls-client-ca", "tls-ca", "tls-client-cert", "tls-client-key")
_HERE = ("model", "host", "drain-timeout-s", "peer-token-file", "api-keys", *_TLS)
DECIDED = {
    "worker": ("port", *_HERE),
    "scheduler": ("worker", "port", *_HERE),
    "gateway": ("scheduler", "http-port", "grpc-port", *_HERE),
}


def check_reserved(config: Path | None, environ: Mapping[str, str]) -> None:
    """Refuses by name what is for services that are started one by one. Raises CommandError."""
    own = {environment.variable(name) for name in OPTIONS["up"]}
    file = None if config is None else config_file.read(config)
    for service, names in DECIDED.items():
        for name in names:
            found = environment.found(name, service, environ)
            if found is not None and found[0] not in own:
                raise CommandError(f"{found[0]}: {_reason(name)}")
            if file is not None and not file.is_flat and name in file.of(service):
                raise CommandError(f"--config: {file.path}: {service}: {name}: {_reason(name)}")
        if file is not None and not file.is_flat:
            config_file.check_keys(file, service)


def with_config(settings: Settings, config: Path | None) -> Settings:
    """The settings, with a file of sections passed on to the services."""
    if config is None or config_file.read(config).is_flat:
        return settings
    words = ("--config", str(config.absolute()))
    return replace(
        settings,
        worker_options=(*words, *settings.worker_options),
        scheduler_options=(*words, *settings.scheduler_options),
        gateway_options=(*words, *settings.gateway_options),
    )


def settings_line(config: Path | None, environ: Mapping[str, str]) -> str:
    """The sources of options that were not typed: variables by name, and the file."""
    places = [] if config is None else [str(config)]
    return ", ".join([*_variables(environ), *places])


def _variables(environ: Mapping[str, str]) -> Iterator[str]:
    names = {
        found[0]
        for command in ("up", *SERVICES)
        for option in OPTIONS[command]
        if (found := environment.found(option, command, environ)) is not None
    }
    yield from sorted(names)


def _reason(name: str) -> str:
    if name in _TLS:
        return "is for services that are started one by one; here --tls makes certificates for all"
    hint = f"; give up's own {name}" if name in OPTIONS["up"] else ""
    return f"`pagewire up` decides this for its services{hint}"
