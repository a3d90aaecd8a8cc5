"""How `mstar adapters` shows things: rich tables for people, plain data for `--json`. Pure: nothing is printed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.markup import escape
from rich.table import Table

from mstar.adapters.facts import AdapterFacts
from mstar.adapters.outline import Outline, spans


def size_text(size_bytes: int) -> str:
    """Bytes for people, decimal as file managers have them."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def served_rows(cards: Sequence[Mapping[str, Any]], status: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """One mapping per served adapter: what the list says and, where the ranks answer, where it is."""
    ranks = status["ranks"] if status is not None else []
    slots = {slot["adapter"]: slot for slot in ranks[0]["slots"] if slot["adapter"] is not None} if ranks else {}
    on_all = set.intersection(*(set(rank["host_adapters"]) for rank in ranks)) if ranks else set()
    pinned = set(status["pinned"]) if status is not None else set()
    rows = []
    for card in cards:
        name, slot = card["id"], slots.get(card["id"])
        row: dict[str, Any] = {"name": name, "path": card["root"], "loaded_at": card["created"]}
        if status is not None:
            row["slot"] = slot["slot"] if slot is not None else None
            row["requests"] = slot["holders"] - (name in pinned) if slot is not None and slot["holders"] else 0
            row["in_host_memory"] = name in on_all
            row["pinned"] = name in pinned
        rows.append(row)
    return rows


def served_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """`mstar adapters ls`."""
    table = Table(title=f"{len(rows)} adapters" if len(rows) != 1 else "1 adapter", title_justify="left")
    for column in ("name", "where", "requests", "loaded", "path"):
        table.add_column(column, justify="right" if column == "requests" else "left", overflow="fold")
    for row in rows:
        table.add_row(escape(row["name"]), _where(row), str(row.get("requests", "")), _time(row["loaded_at"]), escape(row["path"]))
    return table


def _where(row: Mapping[str, Any]) -> str:
    if "slot" not in row:
        return "?"
    if row["slot"] is not None:
        return f"slot {row['slot']}{', pinned' if row['pinned'] else ''}"
    place = "host memory" if row["in_host_memory"] else "disk"
    return f"{place}, pinned" if row["pinned"] else place


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def outline_data(outline: Outline, facts: AdapterFacts | None, problems: Sequence[str]) -> dict[str, Any]:
    """`mstar adapters inspect --json`. `facts` where it was checked against a base."""
    config = outline.config
    return {
        "path": str(outline.folder),
        "files": [{"name": name, "size_bytes": size} for name, size in outline.files],
        "size_bytes": outline.size_bytes,
        "digest": outline.digest,
        "config": None
        if config is None
        else {"r": config.rank, "lora_alpha": config.alpha, "use_rslora": config.use_rslora, "base_model_name_or_path": config.base_name},
        "modules": [
            {
                "module": module.module,
                "layers": sorted(module.layers),
                "ranks": sorted(module.ranks),
                "scales": sorted(module.scales),
                "dtypes": sorted(module.dtypes),
                "tensors": sorted(module.kinds),
            }
            for module in outline.modules
        ],
        "chat_template": None if facts is None else facts.chat_template is not None,
        "warnings": [] if facts is None else list(facts.warnings),
        "problems": list(problems),
    }


def outline_table(outline: Outline) -> Table:
    """Modules by what they have."""
    table = Table(title_justify="left")
    for column in ("module", "layers", "rank", "scale", "dtype", "tensors"):
        table.add_column(column, overflow="fold")
    for module in outline.modules:
        ranks = ", ".join(map(str, sorted(module.ranks))) or "-"
        scales = ", ".join(f"{scale:g}" for scale in sorted(module.scales)) or "-"
        table.add_row(
            escape(module.module),
            spans(module.layers) or "-",
            ranks,
            scales,
            ", ".join(sorted(module.dtypes)),
            ", ".join(sorted(module.kinds)),
        )
    return table


def facts_data(folder: str, facts: AdapterFacts, digest: str) -> dict[str, Any]:
    """`mstar adapters check --json`, where it would be served."""
    return {
        "path": folder,
        "served": True,
        "num_modules": len(facts.modules),
        "max_rank": facts.max_rank,
        "size_bytes": facts.size_bytes,
        "digest": digest,
        "chat_template": facts.chat_template is not None,
        "warnings": list(facts.warnings),
    }
