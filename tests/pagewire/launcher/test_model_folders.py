"""What `pagewire up --model` says about a path that is no model's folder."""

import pytest


def folder(path, *names: str):
    path.mkdir()
    for name in names:
        (path / name).touch()
    return path


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nowhere", "there is no folder {path}; a model is a folder with config.json"),
        ("x/model.gguf", "{path} is a GGUF file, and these are not read: give the folder"),
        ("nowhere.gguf", "{path} is a GGUF file, and these are not read"),
        ("x/model.safetensors", "{path} is one file of a model: give its folder, {parent}"),
        ("x/config.json", "{path} is one file of a model: give its folder, {parent}"),
        ("y/model.safetensors", "{path} is one file of a model, and there is no config.json next"),
        ("y/notes", "{path} is a file; a model is a folder"),
        ("y", "{path} holds no config.json; a model is a folder"),
        ("g", "{path} holds a GGUF file and no config.json: GGUF is not read"),
        ("outer", "{path} holds no config.json, but these do: {path}/inner"),
        ("models--a--b", "{path} holds no config.json, but these do: {path}/snapshots/1f"),
    ],
)
def test_each_path_that_is_no_model_gets_its_own_sentence(up, given, said):
    folder(up.folder / "x", "model.gguf", "model.safetensors", "config.json")
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
