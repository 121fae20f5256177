"""Which files of a folder do not go along with its model unless somebody names them. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import PurePosixPath

from hubshard.messages import listed
from hubshard.names import is_of_training, is_training_folder

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

    Attributes:
        exclude: these.
    """

    def __init__(self, include: Sequence[str], exclude: Sequence[str]) -> None:
        self._include = include
        self.exclude = exclude
        self._secrets: list[str] = []
        self._of_training: dict[str, None] = {}
        self._ignores: list[str] = []

    def takes(self, path: str) -> bool:
        """Whether a file goes along."""
        matching = [pattern for pattern in self._include if fnmatch(path, pattern)]
        if any(fnmatch(path, pattern) for pattern in self.exclude) or (self._include and not matching):
            return False
        if not _is_left_out(path) or any(map(_is_left_out, matching)):
            return True
        if _is_secret(path):
            self._secrets.append(path)
        elif folder := _training_folder(path):
            self._of_training[folder] = None
        elif _is_of_git(path):
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
            notes.append(f"{which}: left out, since such files hold secrets; to publish one, name it in `include`")
        if self._of_training:
            which = listed(list(self._of_training))
            notes.append(f"{which}: left out, as folders of a training run; to publish one, name it in `include`")
        if self._ignores:
            which = listed(self._ignores)
            notes.append(f"{which}: left out, since a Hub refuses files by it; to publish one, name it in `include`")
        return notes


def _is_left_out(path: str) -> bool:
    names = (_is_secret, _is_of_a_tool, _is_of_git, is_of_training)
    return any(is_it(path) for is_it in names) or _training_folder(path) is not None


def _is_of_git(path: str) -> bool:
    return path.rpartition("/")[2] == ".gitignore"


def _is_of_a_tool(path: str) -> bool:
    return not _TOOLS.isdisjoint(path.lower().split("/"))


def _is_secret(path: str) -> bool:
    *folders, name = path.lower().split("/")
    return _SECRET_NAMES.fullmatch(name) is not None or not _SECRET_FOLDERS.isdisjoint(folders)


def _training_folder(path: str) -> str | None:
    """The folder of a training run that a file lies in, if any."""
    folders = [folder for folder in PurePosixPath(path).parents if is_training_folder(folder.name)]
    return f"{folders[-1].as_posix()}/" if folders else None
