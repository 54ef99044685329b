"""Where the files of a model of transformers are: a folder, or a repository of the hub. No torch, no transformers."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.config.model import ModelConfig

CONFIG: Final = "config.json"
INSTALL: Final = "pip install 'shoal[hf]'"
_SNAPSHOTS: Final = "snapshots"


@dataclass(frozen=True)
class Repository:
    """The files of one model.

    Attributes:
        name: A folder, or a name on the hub.
        revision: On the hub; None: the newest.
        is_on_hub: Whether to ask the hub if there is no such folder.
        key: Of the configuration, which names it.
    """

    name: str
    revision: str | None = None
    is_on_hub: bool = True
    key: str = "model.name_or_path"

    @classmethod
    def of(cls, model: ModelConfig) -> Repository:
        """That which a configuration names, by its commit if it has one; a run that has none began from a folder."""
        may_be_on_hub = model.hf_config is None or model.commit is not None
        return cls(model.name_or_path or "", model.commit or model.revision, may_be_on_hub)

    @property
    def folder(self) -> Path | None:
        """The folder, if it is one of this host.

        Raises:
            ConfigError: The name is that of nobody's home.
        """
        try:
            folder = Path(self.name).expanduser()
        except RuntimeError as error:
            raise ConfigError(f"{self.key} = {self.name}: there is no such folder ({error})") from error
        return folder if folder.is_dir() else None

    def path(self, file: str) -> Path:
        """Return where a file is on this host; of the hub it is fetched first, or is here from an earlier time.

        Raises:
            ConfigError: There is no such folder, or the hub does not give the file.
        """
        folder, name = self.folder, self.name
        if folder is not None:
            if not (folder / file).is_file():
                raise ConfigError(f"{name}: this folder has no {file}; give the folder of a model, as it was written")
            return folder / file
        if not self.is_on_hub:
            raise ConfigError(f"{self.key} = {name}: there is no such folder on this host")
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise ConfigError(f"{self.key} = {name}: there is no such folder; give one that has a {file}")
        try:
            hub: Any = importlib.import_module("huggingface_hub")
        except ImportError as error:
            raise ConfigError(f"{self.key} = {name}: to ask the hub needs a package: {INSTALL}") from error
        try:
            return Path(hub.hf_hub_download(name, file, revision=self.revision))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.key} = {name}: there is no such folder here, and the hub does not give its {file} "
                f"({' '.join(str(error).split())[:300]}); check the name and the network, or give a folder"
            ) from error

    def path_if_any(self, file: str) -> Path | None:
        """As `path`; None: the folder or the hub has no such file.

        Raises:
            ConfigError: Nobody can say whether it has.
        """
        folder = self.folder
        if folder is not None and not (folder / file).is_file():
            return None
        try:
            return self.path(file)
        except ConfigError as error:
            # By name: the class is of a package that need not be here.
            if type(error.__cause__).__name__ == "RemoteEntryNotFoundError":
                return None
            raise

    def commit_of(self, path: Path) -> str | None:
        """Return the commit of a file of the hub, which its place in the hub's cache names; None: it is of a folder."""
        parts = path.parts
        return parts[parts.index(_SNAPSHOTS) + 1] if self.folder is None and _SNAPSHOTS in parts[:-2] else None
