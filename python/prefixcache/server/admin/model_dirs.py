"""Where new weights may come from, and what a wrong path may tell."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from prefixcache.config.checked import shortened
from prefixcache.exceptions import FieldError, InvalidRequestError

logger = logging.getLogger(__name__)

_PARAM = "model_path"
_MOST_LOGGED = 1000
"""Characters of an error."""


class ModelDirs:
    """Without `folders` a model may come from anywhere, but no error tells what is there.

    With them it must lie in one of these, and errors are shown in full. Raises `FieldError` for one
    that is no folder.
    """

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise FieldError("--allowed-model-dirs", f"takes folders; {folder} is none.")
        self._folders = [Path(os.path.abspath(folder)) for folder in folders]

    @contextmanager
    def checked(self, model_path: str) -> Generator[str, None, None]:
        """Gives the path to load, and words the errors of loading it for the client.

        Raises `InvalidRequestError` for one that is not allowed.
        """
        if self._folders:
            yield self._inside(model_path)
            return
        try:
            yield model_path
        except InvalidRequestError as error:
            if error.param != _PARAM:
                raise
            logger.warning("New weights were refused: %s", shortened(str(error), _MOST_LOGGED))
            raise InvalidRequestError(
                "model_path names no model whose weights fit; the server's log says why.",
                param=_PARAM,
            ) from None

    def _inside(self, model_path: str) -> str:
        """The absolute path. What lies outside is not even looked at."""
        path = Path(os.path.abspath(model_path))
        if not any(_holds(folder, path) for folder in self._folders):
            raise InvalidRequestError(
                "model_path must lie in a folder of --allowed-model-dirs.", param=_PARAM
            )
        return str(path)


def _holds(folder: Path, path: Path) -> bool:
    """Whether the path lies in the folder, by its name and also once links are followed."""
    try:
        return path.is_relative_to(folder) and path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # no path at all, or links in a circle
        return False
