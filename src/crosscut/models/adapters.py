"""LoRA adapters of PEFT on a model that is split afterwards: each adapter is cut as the layer that it stands beside.

Beside a column layer, ``A [r, H]`` is whole on every rank and ``B [F, r]`` is cut like the layer's output features. Beside a
row layer, ``A [r, F]`` is cut like its input features, so ``x A^T`` is a sum over the ranks, and ``B [H, r]`` is whole. Either
way what a rank merges, ``B A``, is its own part of the whole product, and the pair costs one exchange of r numbers a token.
LoRA: arXiv 2106.09685.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from crosscut.distributed.mesh import Mesh
from crosscut.errors import UsageError
from crosscut.layers.replicas import placed_parameters
from crosscut.model_config import ModelConfig
from crosscut.models.agree import together
from crosscut.sharding import Family, Place, Replicated, Role, cut_of
from crosscut.sharding.roles import role_cut

ROWS = {Role.ROW, Role.ATTENTION_OUT, Role.LATENT_OUT}

_OTHERS = re.compile(r"\blora_|\b(modules_to_save|original_module|token_adapter)\.")
"""What else PEFT puts into names: embeddings' adapters, DoRA's magnitudes, modules kept beside their originals, tokens."""

SIDES: dict[str, Callable[[Role], Role | None]] = {
    "A": lambda role: role if role in ROWS else None,
    "B": lambda role: None if role in ROWS else role,
}
"""The role of an adapter's half beside a layer with a role; None: whole on every rank."""


def core_of(model: Any) -> Any:
    """The transformers model inside a PEFT model; any other model itself.

    Raises UsageError (``bad-option``) for adapters other than LoRA.
    """
    if not hasattr(model, "get_base_model"):
        return model
    others = {config.peft_type for config in model.peft_config.values()} - {"LORA"}
    if others:
        raise UsageError(
            f"adapters of type {', '.join(sorted(map(str, others)))} cannot be split",
            code="bad-option",
            fix="use LoRA, or merge the adapters into the model first",
        )
    return model.get_base_model()


def layer_of(path: str) -> tuple[str, str]:
    """The path that the layer has without PEFT, and which part of it ``path`` is: '' (the layer itself), 'A' or 'B'.

    ``layer_of("mlp.up_proj.lora_A.default") == ("mlp.up_proj", "A")``
    """
    words = path.split(".")
    if len(words) > 2 and words[-2] in ("lora_A", "lora_B"):
        return ".".join(words[:-2]), words[-2][-1]
    return path.removesuffix(".base_layer"), ""


def place_of(config: ModelConfig, family: Family, path: str, name: str, shape: tuple[int, ...]) -> Place:
    """:func:`crosscut.sharding.cut_of` for the parameter ``name`` of the module at ``path``, which may be an adapter.

    Raises UsageError (``bad-option``) for what PEFT adds beside the LoRA adapters of linear layers, and as ``cut_of`` does.
    """
    layer, part = layer_of(path)
    rule = family.find(f"{layer}.weight") if part else None
    if rule is None and (part or _OTHERS.search(f"{path}.{name}")):
        raise UsageError(
            f"{f'{path}.{name}'!r} is of PEFT, and no LoRA adapter of a linear layer: it cannot be split",
            code="bad-option",
            fix="adapt linear layers alone, without DoRA, modules_to_save, trainable tokens or experts; or merge the adapters",
        )
    if rule is None:
        return cut_of(config, family, f"{layer}.{name}", shape)
    role = SIDES[part](rule.role) or Role.REPLICATED
    cut = Replicated() if role is Role.REPLICATED else role_cut(role, config, shape)
    return Place(f"{path}.{name}", role, cut)


class SplitAdapters:
    """In front of a PEFT model's class: adapters are saved whole, as if the model were not split."""

    mesh: Mesh

    def add_adapter(self, adapter_name: str, *args: Any, **options: Any) -> None:
        """Refuses: PEFT would give it the sizes of the whole layers, and no exchanges."""
        raise UsageError(
            f"the adapter {adapter_name!r} cannot be added to a model that is split already",
            code="bad-option",
            fix="add or load it before parallelize; crosscut.gather(model) undoes the split",
        )

    def load_adapter(self, model_id: str, adapter_name: str, *args: Any, **options: Any) -> None:
        """Refuses, as :meth:`add_adapter`."""
        self.add_adapter(adapter_name)

    def save_pretrained(self, save_directory: str, **options: Any) -> None:
        """As PEFT's ``save_pretrained``, from the first rank; the adapters alone are gathered. A collective call."""
        adapters = {p.name: p.whole(self.mesh.tp) for p in placed_parameters(self) if ".lora_" in p.name}  # type: ignore[arg-type]
        save = super().save_pretrained  # type: ignore[misc]
        first = self.mesh.rank == 0
        together(self.mesh, lambda: save(save_directory, **{"state_dict": adapters, **options}) if first else None)
