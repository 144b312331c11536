"""Messages of `pagewire up --model` about a path that is no model's folder."""

import pytest

from tests.gguf_files import tiny_file


def folder(path, *names: str):
    path.mkdir()
    for name in names:
        (path / name).touch()
    return path


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nowhere", "there is no folder {path}; a model is a folder with config.json"),
        ("x/model.gguf", "model.gguf: the file is empty"),
        ("x/long.gguf", "long.gguf: the header: it does not begin with GGUF"),
        ("nowhere.gguf", "there is no file {path}"),
        ("x/model.safetensors", "{path} is one file of a model: give its folder, {parent}"),
        ("x/config.json", "{path} is one file of a model: give its folder, {parent}"),
        ("y/model.safetensors", "{path} is one file of a model, and there is no config.json next"),
        ("y/notes", "{path} is a file; a model is a folder"),
        ("y", "{path} holds no config.json; a model is a folder"),
        ("g", "{path} holds no config.json, but GGUF: give the file, {path}/model.gguf"),
        ("outer", "{path} holds no config.json, but these do: {path}/inner"),
        ("models--a--b", "{path} holds no config.json, but these do: {path}/snapshots/1f"),
    ],
)
def test_each_path_that_is_no_model_gets_its_own_sentence(up, given, said):
    folder(up.folder / "x", "model.gguf", "model.safetensors", "config.json")
    (up.folder / "x" / "long.gguf").write_bytes(bytes(100))
    folder(up.folder / "y", "model.safetensors", "notes")
    folder(up.folder / "g", "model.gguf")
    folder(up.folder / "outer")
    folder(up.folder / "outer" / "inner", "config.json")
    folder(up.folder / "models--a--b")
    folder(up.folder / "models--a--b" / "snapshots")
    folder(up.folder / "models--a--b" / "snapshots" / "1f", "config.json")
    path = up.folder / given
    status, _, err = up.finish("--model", str(path))
    assert status == 1
    assert f"--model: {said.format(path=path, parent=path.parent)}" in err.replace("\n", "")
    assert "Traceback" not in err and err.count("\n") == 1


def test_a_gguf_file_is_served_under_its_name_without_the_format(up):
    file = tiny_file().write(up.folder / "Some-Model-Q4_K_M.gguf")
    link = up.folder / "Other.Q8_0.gguf"
    link.symlink_to(file)
    for path, name in ((file, "Some-Model"), (link, "Other")):
        status, out, err = up.finish("--once", "--no-page", "--model", str(path))
        assert f"model     {name} " in out + err, (status, out, err)


def test_a_gguf_file_of_another_architecture_is_refused_before_a_service_starts(up):
    def edit(file):
        file.architecture = "phi3"

    path = tiny_file(edit).write(up.folder / "phi.gguf")
    status, _, err = up.finish("--model", str(path))
    assert status == 1 and err.count("\n") == 1
    assert "--model: phi.gguf: general.architecture: 'phi3' is not supported" in err
