"""Random adapters for the tiny models, written by peft: mixed ranks, all projections or some, heavy enough to move every logit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.tiny_models import built_once, tiny_model

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
DELTA_STD = 0.06  # of an entry of scaling * B @ A; the tiny models' own weights have 0.15


@dataclass(frozen=True)
class AdapterRecipe:
    """What an adapter is made from."""

    lora_rank: int
    modules: tuple[str, ...] = (*ATTENTION, *MLP)
    fields: dict[str, Any] = field(default_factory=dict)


RECIPES = {
    "rank1": AdapterRecipe(1),
    "rank5-qkv": AdapterRecipe(5, ("q_proj", "k_proj", "v_proj")),
    "rank8-rslora": AdapterRecipe(8, fields={"use_rslora": True}),
    "rank16-mlp": AdapterRecipe(16, MLP),
    "rank33-mixed": AdapterRecipe(33, fields={"rank_pattern": {"q_proj": 3, "down_proj": 12}, "alpha_pattern": {"v_proj": 7}}),
    "rank64": AdapterRecipe(64),
}
ADAPTERS = tuple(RECIPES)
EXTRA = AdapterRecipe(6)  # in the same folder, for tests that load one while the server runs
MAX_LORA_RANK = 64


def tiny_adapters(family: str) -> dict[str, Path]:
    """The six adapters of the tiny model of `family`, and `extra`: name to folder."""
    sources = (Path(__file__), Path(__file__).with_name("tiny_models.py"), Path(__file__).parents[1] / "unit/models/tiny.py")

    def build(folder: Path) -> None:
        for seed, (name, recipe) in enumerate(RECIPES.items()):
            write_adapter(folder / name, tiny_model(family), recipe, seed)
        write_adapter(folder / "extra", tiny_model(family), EXTRA, seed=len(RECIPES))

    place = built_once(f"adapters-{family}", sources, build)
    return {name: place / name for name in (*RECIPES, "extra")}


def write_adapter(folder: Path, model_folder: Path, recipe: AdapterRecipe, seed: int) -> None:
    """Save a random adapter for the model in `model_folder`, the same for the same `seed`."""
    import torch  # late, like the others: they take seconds, and mostly the folders are there
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(seed)
    config = LoraConfig(
        r=recipe.lora_rank, lora_alpha=2 * recipe.lora_rank, target_modules=list(recipe.modules), task_type="CAUSAL_LM", **recipe.fields
    )
    with peft_warnings_ignored():
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), config)
        with torch.no_grad():
            for layer in model.modules():
                if isinstance(layer, LoraLayer):
                    lora_a, lora_b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
                    lora_a.copy_(torch.randn(lora_a.shape, generator=generator) / lora_a.shape[0] ** 0.5)
                    lora_b.copy_(torch.randn(lora_b.shape, generator=generator) * DELTA_STD / layer.scaling["default"])
        model.save_pretrained(str(folder))


@contextmanager
def peft_warnings_ignored() -> Iterator[None]:
    """peft 0.21 reads an attribute that transformers 5.24 has deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        yield
