"""API keys: the file, what it refuses, how it is read again; the command that makes keys."""

from functools import partial
from pathlib import Path

import pytest

from wire.identity.__main__ import main
from wire.identity.access import Access, AccessDenied
from wire.identity.keys import KeyRing, new_key, read_keys
from wire.identity.roles import Role
from wire.identity.watched import BadIdentityFile, Watched

HASH = "sha256:" + "0" * 64


def test_a_key_is_found_with_its_tenant_and_roles_and_is_not_in_the_file(tmp_path: Path) -> None:
    alice, line = new_key("alice", "acme", [Role.USER])
    ops, other = new_key("ops", "infra", [Role.USER, Role.OPERATOR])
    file = tmp_path / "keys"
    file.write_text(
        f"# name tenant roles hash\n\n{line.line()}\n{other.line()}  # the night shift\n"
    )
    assert alice not in file.read_text()
    ring = read_keys(file)
    found = ring.find(alice)
    assert found is not None
    assert (found.name, found.tenant, found.roles) == ("alice", "acme", {Role.USER})
    assert ring.find(ops).roles == {Role.USER, Role.OPERATOR}  # type: ignore[union-attr]
    wrong = [
        alice[:-1],
        alice + "x",
        "",
        "alice",
        "pw_alice_",
        "pw_bob_x",
        ops.replace("ops", "alice"),
    ]
    assert [ring.find(key) for key in (*wrong, "ключ", "\udcff")] == [None] * (len(wrong) + 2)


def test_two_keys_of_one_name_differ() -> None:
    assert new_key("a", "t", [Role.USER])[0] != new_key("a", "t", [Role.USER])[0]


def test_a_single_key_has_all_roles_and_no_tenant() -> None:
    found = KeyRing.of_single("pw_any_thing").find("pw_any_thing")
    assert found is not None
    assert (found.tenant, found.roles) == (None, {Role.USER, Role.OPERATOR})
    assert KeyRing.of_single("secret").find("secre") is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"a t user {HASH}\nb t", "line 2: has 2 words"),
        (f"a t user {HASH}\na t user {HASH}", "line 2: 'a' is there twice"),
        (f"a t admin {HASH}", "line 1: 'admin' is no role"),
        (f"a t peer {HASH}", "line 1: 'peer' is no role"),
        (f"a_b t user {HASH}", "line 1: name"),
        (f"a t/u user {HASH}", "line 1: tenant"),
        ("a t user secret", "line 1: the last word"),
        ("ключ t user secret", "ascii"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(BadIdentityFile, match="--api-keys") as caught:
        Watched("--api-keys", [file], partial(read_keys, file))
    assert problem in str(caught.value)


def test_a_changed_file_counts_at_once_and_a_broken_one_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (first, line), (second, other) = (new_key(name, "t", [Role.USER]) for name in "ab")
    file = tmp_path / "keys"
    file.write_text(line.line())
    access = Access(keys=Watched("--api-keys", [file], partial(read_keys, file)).current)
    bearer = "Bearer {}".format
    assert access.identify(bearer(first)).name == "a"
    file.write_text(f"{other.line()}\n\n")
    assert access.identify(bearer(second)).name == "b"
    with pytest.raises(AccessDenied):
        access.identify(bearer(first))
    file.write_text("half a li")
    assert access.identify(bearer(second)).name == "b"
    file.unlink()
    assert access.identify(bearer(second)).name == "b"
    assert caplog.text.count("is not used") == 2
    assert second not in caplog.text


def test_the_command_prints_the_key_once_and_a_line_that_fits_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["new", "--name", "alice", "--tenant", "acme", "--role", "user", "--role", "operator"]
    assert main(words) == 0
    key, line = capsys.readouterr().out.splitlines()
    (tmp_path / "keys").write_text(line)
    found = read_keys(tmp_path / "keys").find(key)
    assert found is not None and found.roles == {Role.USER, Role.OPERATOR}
    for wrong in (["--name", "a b"], ["--tenant", ""], ["--role", "peer"]):
        with pytest.raises(SystemExit):
            main([*words, *wrong])
        assert wrong[0] in capsys.readouterr().err
