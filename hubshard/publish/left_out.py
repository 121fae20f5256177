"""Which files of a folder do not go along with its model unless somebody names them. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatch
from pathlib import PurePosixPath

from hubshard.messages import listed
from hubshard.names import is_of_training, is_training_folder
from hubshard.sources.weight_files import adapters_named_as_steps

__all__ = ["Choice"]

_TOOLS = frozenset({".git", ".cache", "__pycache__", ".ds_store"})
_SECRET_NAMES = re.compile(
    r"\.env.*|[._]netrc|\.git-credentials|\.npmrc|\.pypirc|\.pgpass|\.htpasswd|id_(?:rsa|dsa|ecdsa|ed25519)(?:_sk)?"
    r"|.*\.(?:pem|key|p12|pfx|ppk|jks|keystore|kdbx)",
    re.DOTALL,
)
_SECRET_FOLDERS = frozenset({".ssh", ".aws", ".azure", ".docker", ".gnupg", ".huggingface", ".kube"})


class Choice:
    """The files of a folder that go along with its model.

    What tools keep in a folder (`.git`, caches), the state of trainers and their folders (`checkpoint-500`), what holds
    secrets as a rule (`.env`, private keys), and `.gitignore`, by which a Hub would refuse what git is to leave in the
    folder, weights above all, is left out, unless a pattern of `include` names it: one that would
    be left out as a file name itself, such as `.env.example` or `checkpoint-500/*`, but not `*`.

    Args:
        include: patterns of what goes along; all by default.
        exclude: patterns of what does not, whatever else is said.
        paths: of all files: an adapter is none of a trainer's folders, though it may be called as they are.

    Attributes:
        exclude: these.
    """

    def __init__(self, include: Sequence[str], exclude: Sequence[str], paths: Iterable[str] = ()) -> None:
        self._include = include
        self._adapters = adapters_named_as_steps(paths)
        self.exclude = exclude
        self._secrets: list[str] = []
        self._of_training: dict[str, None] = {}
        self._ignores: list[str] = []

    def takes(self, path: str) -> bool:
        """Whether a file goes along."""
        matching = [pattern for pattern in self._include if fnmatch(path, pattern)]
        if any(fnmatch(path, pattern) for pattern in self.exclude) or (self._include and not matching):
            return False
        folder = _training_folder(path, self._adapters)
        if not (_is_left_out_by_name(path) or folder) or any(map(_is_left_out, matching)):
            return True
        if _is_secret(path):
            self._secrets.append(path)
        elif folder:
            self._of_training[folder] = None
        elif _is_gitignore(path):
            self._ignores.append(path)
        return False

    def is_left(self, path: str) -> bool:
        """Whether a path stays behind, be it of a file or of a folder with all that is in it."""
        return not (self.takes(path) and self.takes(f"{path}/_"))

    def notes(self) -> list[str]:
        """What was left out and might be missed, in sentences for people."""
        notes = []
        if self._secrets:
            which = listed(self._secrets)
            notes.append(f"{which}: left out, since such files hold secrets; {self._advice(self._secrets[0])}")
        if self._of_training:
            folders = list(self._of_training)
            notes.append(f"{listed(folders)}: left out, as folders of a training run; {self._advice(f'{folders[0]}*')}")
        if self._ignores:
            which = listed(self._ignores)
            notes.append(f"{which}: left out, since a Hub refuses files by it; {self._advice(self._ignores[0])}")
        return notes

    def _advice(self, pattern: str) -> str:
        """How to take something along with all else that goes: patterns replace the choice of all files."""
        patterns = [f'"{each}"' for each in (*(self._include or ("*",)), pattern)]
        options = " ".join(f"--include {each}" for each in patterns)
        return f"to publish {pattern} too: `{options}`, in Python include=[{', '.join(patterns)}]"


def _is_left_out(pattern: str) -> bool:
    return _is_left_out_by_name(pattern) or _training_folder(pattern) is not None


def _is_left_out_by_name(path: str) -> bool:
    return any(is_it(path) for is_it in (_is_secret, _is_of_a_tool, _is_gitignore, is_of_training))


def _is_gitignore(path: str) -> bool:
    return path.rpartition("/")[2] == ".gitignore"


def _is_of_a_tool(path: str) -> bool:
    return not _TOOLS.isdisjoint(path.lower().split("/"))


def _is_secret(path: str) -> bool:
    *folders, name = path.lower().split("/")
    return _SECRET_NAMES.fullmatch(name) is not None or not _SECRET_FOLDERS.isdisjoint(folders)


def _training_folder(path: str, adapters: Collection[str] = ()) -> str | None:
    """The folder of a training run that a file lies in, if any; `adapters` are none, whatever they are called."""
    above = PurePosixPath(path).parents
    folders = [folder for folder in above if is_training_folder(folder.name) and str(folder) not in adapters]
    return f"{folders[-1].as_posix()}/" if folders else None
