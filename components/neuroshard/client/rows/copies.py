"""Rows that every rank has a copy of, trained alike on all of them. Needs torch and torchrec.

TorchRec trains copied tables by the dense optimizer, and cannot train copied sequences. These are trained as its fused operator
trains the rest of the table: in backward, by the optimizer and settings of the sharders' `fused_params` (or of
apply_optimizer_in_backward). The ranks add up their gradients, rows x columns of fp32 each step whatever was read, and every
rank makes the same update. So a row learns the same whether it is in the hot part or in the cold one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.optim.fused import FusedOptimizer, FusedOptimizerModule
from torchrec.optim.keyed import KeyedOptimizer

from neuroshard.core.errors import InvalidInput
from neuroshard.files.importers.torchrec_collections import in_backward

DEFAULT_RATE, DEFAULT_EPS = 0.01, 1e-8  # FBGEMM's
TRAINED = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.EXACT_ADAGRAD)
# settings of the operator that change what is learned, and that copies do not have
NOT_FOLLOWED = (
    "weight_decay",
    "gradient_clipping",
    "max_norm",
    "counter_based_regularization",
    "cowclip_regularization",
    "global_weight_decay",
    "extra_optimizer_config",
)


class Copies(nn.Module, FusedOptimizerModule):
    """The weights of copied parts, by name, and their optimizer. `start` makes them ready to be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.configs: dict[str, EmbeddingBagConfig | EmbeddingConfig] = {}
        self.settings: dict[str, dict[str, Any]] = {}
        self.group: dist.ProcessGroup | None = None
        self._optimizer: _CopiesOptimizer | None = None
        self._begins_backward = torch.zeros(0, requires_grad=True)  # the lookups' gradients are not anybody's else

    def add(self, name: str, config: EmbeddingBagConfig | EmbeddingConfig, weight: nn.Parameter) -> None:
        """A copied part of the table of `config`. It is a buffer: no dense optimizer finds it, and DDP leaves it alone."""
        self.register_buffer(name, weight.detach())
        self.configs[name] = config
        classes, self.settings[name] = in_backward(weight)
        if classes:
            self.settings[name]["optimizer"] = optimizer_type_to_emb_opt_type(classes[0])
        if "lr" in self.settings[name]:
            self.settings[name]["learning_rate"] = self.settings[name].pop("lr")

    def weight(self, name: str) -> Tensor:
        return self.get_buffer(name)

    def start(
        self, fused_params: Mapping[str, Any] | None, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        """Bring the copies to a device, the same on all ranks of the group, and let them be trained by these settings.

        Raises InvalidInput, which names table and setting, for an optimizer or a setting by which they would be trained
        otherwise than the rest of the table.
        """
        self.group = group
        given = {name: {**(fused_params or {}), **own} for name, own in self.settings.items()}
        for name, config in self.configs.items():
            _check(config, given[name], device)
            weight = self.weight(name)
            if weight.is_meta:
                weight = torch.empty_like(weight, device=device)
                if config.init_fn is not None:
                    config.init_fn(weight)
            weight = weight.to(device)
            if group is not None:
                dist.broadcast(weight, dist.get_global_rank(group, 0), group=group)
            self.register_buffer(name, weight)
        self._begins_backward = torch.zeros(0, device=device, requires_grad=True)
        self._optimizer = _CopiesOptimizer({name: self.weight(name) for name in self.configs}, given)

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        return self._optimizer or _CopiesOptimizer({}, {})

    def forward(self, asked: Sequence[tuple[str, Tensor]]) -> tuple[Tensor, ...]:
        """The rows asked for, in fp32: for each name and tensor of rows a tensor of (rows, columns)."""
        names = [name for name, _ in asked]
        look_up: Any = _LookUp.apply  # untyped
        found: tuple[Tensor, ...] = look_up(self, names, self._begins_backward, *(rows for _, rows in asked))
        return found

    def learn(self, names: Sequence[str], rows: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Update all copies that were read, by the gradients of all ranks."""
        if self._optimizer is None:
            raise InvalidInput("copied rows are trained after DistributedModelParallel only; shard the model first")
        sums = {name: torch.zeros_like(self.weight(name), dtype=torch.float32) for name in dict.fromkeys(names)}
        for name, of, gradient in zip(names, rows, gradients, strict=True):
            sums[name].index_add_(0, of, gradient.float())
        works = [dist.all_reduce(each, group=self.group, async_op=True) for each in sums.values()]
        ranks = dist.get_world_size(self.group) if get_gradient_division() else 1
        for (name, gradient), work in zip(sums.items(), works, strict=True):
            work.wait()
            self._optimizer.update(name, gradient.div_(ranks))


class _LookUp(torch.autograd.Function):
    """Rows of copies, whose backward trains them."""

    @staticmethod
    def forward(ctx: Any, copies: Copies, names: list[str], _: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.copies, ctx.names = copies, names
        ctx.save_for_backward(*rows)
        return tuple(copies.weight(name)[of].float() for name, of in zip(names, rows, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        rows = ctx.saved_tensors
        ctx.copies.learn(ctx.names, rows, gradients)
        return (None, None, None, *(None for _ in rows))


class _CopiesOptimizer(FusedOptimizer):
    """SGD, Adagrad and row-wise Adagrad as FBGEMM's operator has them. State has its names: `TABLE.momentum1`."""

    def __init__(self, weights: Mapping[str, Tensor], settings: Mapping[str, Mapping[str, Any]]) -> None:
        self.kinds = {name: of.get("optimizer", EmbOptimType.EXACT_SGD) for name, of in settings.items()}
        state: dict[Tensor, dict[str, Tensor]] = {}
        for name, weight in weights.items():
            state[weight] = {}
            if self.kinds[name] is not EmbOptimType.EXACT_SGD:
                by_row = self.kinds[name] is EmbOptimType.EXACT_ROWWISE_ADAGRAD
                like = weight[:, 0] if by_row else weight
                state[weight][f"{name}.momentum1"] = torch.zeros_like(like, dtype=torch.float32)
        groups: list[dict[str, Any]] = [
            {
                "params": [weights[name]],
                "lr": float(of.get("learning_rate", DEFAULT_RATE)),
                "eps": float(of.get("eps", DEFAULT_EPS)),
            }
            for name, of in settings.items()
        ]
        super().__init__(weights, state, groups)
        self.groups = dict(zip(weights, groups, strict=True))

    def step(self, closure: Any = None) -> None:
        """Nothing: rows are updated in backward, by the learning rate that their group has then."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Nothing: there are no gradients left."""

    @torch.no_grad()
    def update(self, name: str, gradient: Tensor) -> None:
        weight, group = self.params[name], self.groups[name]
        if self.kinds[name] is not EmbOptimType.EXACT_SGD:
            moment = self.state[weight][f"{name}.momentum1"]
            if moment.dim() == 1:
                moment += gradient.square().mean(dim=1)
                gradient = gradient / (moment.sqrt() + group["eps"]).unsqueeze(1)
            else:
                moment += gradient.square()
                gradient = gradient / (moment.sqrt() + group["eps"])
        weight.copy_(weight.float() - group["lr"] * gradient)


def _check(config: EmbeddingBagConfig | EmbeddingConfig, settings: Mapping[str, Any], device: torch.device) -> None:
    """Raise InvalidInput where copies would be trained otherwise than the rest of their table."""
    what = f"table {config.name!r}: its hot rows are copied to every rank, and"
    kind = settings.get("optimizer", EmbOptimType.EXACT_SGD)
    if kind not in TRAINED:
        raise InvalidInput(
            f"{what} copies are trained by {', '.join(str(each) for each in TRAINED)} only, not by {kind}, whose update of a row "
            "depends on when it was read; shard the hot rows, or leave the table whole"
        )
    for key in NOT_FOLLOWED:
        if settings.get(key):
            raise InvalidInput(
                f"{what} copies do not follow {key}={settings[key]!r}; leave it out, or shard the hot rows"
            )
    if config.data_type.value == "FP16" and device.type == "cuda" and settings.get("stochastic_rounding", True):
        raise InvalidInput(
            f"{what} copies of fp16 rows are rounded to the nearest value, where FBGEMM rounds at random; set "
            "stochastic_rounding=False, or shard the hot rows"
        )
