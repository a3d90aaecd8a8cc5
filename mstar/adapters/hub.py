"""Adapters named by a hub id: `org/name` or `org/name@revision`, fetched into the hub's local cache.

`huggingface_hub` does the fetching and honours its own environment (HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE, HF_TOKEN); only an adapter's
own files are fetched, never a pickle, and no more than `MAX_FETCH_BYTES`. What was fetched is then checked like any other folder.

Blocks for as long as the network takes: the front calls it in a thread.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mstar.adapters.beside import ADDED_NAME, TEMPLATE_NAME, TOKENIZER_NAME
from mstar.adapters.catalogue import refuse, shown
from mstar.adapters.files import CONFIG_NAME, INDEX_NAME, WEIGHTS_NAME
from mstar.errors import AdapterError

ADAPTER_FILES = (CONFIG_NAME, WEIGHTS_NAME, INDEX_NAME, "adapter_model-*.safetensors", TEMPLATE_NAME, TOKENIZER_NAME, ADDED_NAME)
MAX_FETCH_BYTES = 8 << 30

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9_]|[-.](?![-.])){0,94}"
_HUB_ID = re.compile(rf"({_PART}/{_PART})(?:@([A-Za-z0-9](?:[A-Za-z0-9_/-]|\.(?!\.)){{0,99}}))?")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HubId:
    """A repository and, where given, its branch, tag or commit."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


@dataclass(frozen=True)
class Snapshot:
    """A fetched adapter: `folder` holds its files, `place` also what their links lead to. Never changed: a new commit is a new folder."""

    folder: Path
    place: Path


def parse_hub_id(text: str) -> HubId | None:
    """`text` as a hub id; None where it does not look like one."""
    match = _HUB_ID.fullmatch(text)
    return HubId(match[1], match[2]) if match else None


def fetch(hub_id: HubId) -> Snapshot:
    """Fetch the adapter's files, or take them from the cache where the hub cannot be reached.

    Raises AdapterError: 404 where the hub shows no such repository or revision, 400 where it holds no adapter or too much,
    503 where the hub cannot be reached and the cache does not have it.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError

    where: dict[str, Any] = {"repo_id": hub_id.repo, "revision": hub_id.revision, "allow_patterns": list(ADAPTER_FILES)}
    try:
        with contextlib.suppress(DryRunError):  # no answer that helps: the call below finds it in the cache, or says why not
            _check_listing(hub_id, snapshot_download(**where, dry_run=True, tqdm_class=_silent()))
        folder = Path(snapshot_download(**where, tqdm_class=_silent()))
    except AdapterError:
        raise
    except Exception as error:  # whatever the hub's client raises is about this one fetch
        raise _refused(hub_id, error) from error
    return Snapshot(folder, folder.parent.parent)


def _check_listing(hub_id: HubId, files: Sequence[Any]) -> None:
    """Refuse before anything is fetched: `files` are those of ADAPTER_FILES that the repository has, with their sizes."""
    names = {file.filename for file in files}
    if CONFIG_NAME not in names:
        raise refuse("hub_no_adapter", name=hub_id, problem=f"has no {CONFIG_NAME}")
    if not any(name.endswith(".safetensors") for name in names):
        raise refuse("hub_no_adapter", name=hub_id, problem=f"has no {WEIGHTS_NAME}")
    size = sum(file.file_size for file in files)
    if size > MAX_FETCH_BYTES:
        raise refuse("hub_too_large", name=hub_id, size=size, limit=MAX_FETCH_BYTES)
    log.info("hub: %s has %d adapter files, %.1f MB", hub_id, len(names), size / 1e6)


def _refused(hub_id: HubId, error: Exception) -> AdapterError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return refuse("hub_not_found", what=f"files of {hub_id}, which is gated")
    if isinstance(error, errors.RevisionNotFoundError):
        return refuse("hub_not_found", what=f"revision {shown(hub_id.revision)} of {hub_id.repo}")
    if isinstance(error, errors.RepositoryNotFoundError) or _status(error) in (401, 403, 404):
        return refuse("hub_not_found", what=f"repository {hub_id.repo}")
    log.warning("hub: fetching %s failed: %s", hub_id, " ".join(str(error).split())[:500])
    return refuse("hub_unreachable", name=hub_id, problem=_reason(error))


def _status(error: BaseException | None) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _reason(error: BaseException) -> str:
    """The innermost cause in a few words; never the client's own text, which may hold addresses."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    status = _status(error)
    return type(error).__name__ if status is None else f"it answered {status}"


def _silent() -> type[Any]:
    """A progress bar that shows nothing: this may be a server's log."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Silent(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    return Silent
