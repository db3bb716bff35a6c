"""TorchRec's sharding of a collection whose tables are held by access (client/rows/). Needs torch and torchrec.

Give DistributedModelParallel, among its sharders, `CollectionByAccessSharder` with the sharders of the collections inside. It
is a ShardedModule as TorchRec's own of feature processors is, so that its pipelines send ids ahead as for any collection: ids
are mapped in `input_dist`, copied rows are looked up when the rest is, and outputs are joined when they are waited for.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.embedding import EmbeddingCollectionContext, EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, KJTList, ShardedEmbeddingModule
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext, EmbeddingBagCollectionSharder
from torchrec.distributed.types import Awaitable, LazyAwaitable, ParameterSharding, ShardingEnv
from torchrec.distributed.utils import append_prefix
from torchrec.streamable import Multistreamable

from neuroshard.client.rows.collection import CollectionByAccess, Joining


@dataclass
class _Joinings(Multistreamable):
    joinings: list[Joining] = field(default_factory=list)

    def record_stream(self, stream: torch.Stream) -> None:
        super().record_stream(stream)
        for each in self.joinings:
            each.record_stream(stream)


@dataclass
class _PooledContext(_Joinings, EmbeddingBagCollectionContext):
    pass


@dataclass
class _SequenceContext(_Joinings, EmbeddingCollectionContext):
    pass


Context = _PooledContext | _SequenceContext
Output = KeyedTensor | dict[str, JaggedTensor]


class ShardedCollectionByAccess(ShardedEmbeddingModule[KJTList, list[torch.Tensor], Output, Context]):
    """The collection inside sharded as `params` say, by the names of its tables."""

    def __init__(
        self,
        module: CollectionByAccess,
        params: dict[str, ParameterSharding],
        sharder: Any,
        env: ShardingEnv,
        device: torch.device,
        module_fqn: str | None,
    ) -> None:
        super().__init__()
        self.rows = module.rows.to(device)
        self.params, self.device, self.group = params, device, env.process_group
        self.copies = module.copies
        self.copies.start(sharder.fused_params, device, env.process_group)
        self.inner = sharder.shard(module.inner, params, env=env, device=device, module_fqn=module_fqn)
        self._lookups = self.inner._lookups  # which TorchRec's prefetching asks for

    @property
    def output_names(self) -> list[str]:
        """The keys of the output, in order, whatever the plan."""
        return self.rows.output_names

    def create_context(self) -> Context:
        return _PooledContext() if self.rows.pooled else _SequenceContext()

    def input_dist(self, ctx: Context, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        inside, ctx.joinings = self.rows.split(features)
        sent: Awaitable[Awaitable[KJTList]] = self.inner.input_dist(ctx, inside)
        return sent

    def compute(self, ctx: Context, dist_input: KJTList) -> list[torch.Tensor]:
        found: list[torch.Tensor] = self.inner.compute(ctx, dist_input)
        return found

    def output_dist(self, ctx: Context, output: list[torch.Tensor]) -> LazyAwaitable[Output]:
        return self._joined(ctx, self.inner.output_dist(ctx, output))

    def compute_and_output_dist(self, ctx: Context, input: KJTList) -> LazyAwaitable[Output]:  # noqa: A002
        return self._joined(ctx, self.inner.compute_and_output_dist(ctx, input))

    def _joined(self, ctx: Context, sent: LazyAwaitable[Output]) -> LazyAwaitable[Output]:
        """Outputs on their way, joined with copied rows, which are looked up meanwhile."""
        looked_up = self.rows.look_up(ctx.joinings, self.copies)
        sent.callbacks.append(partial(self.rows.join, joinings=ctx.joinings, looked_up=looked_up))
        return sent

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        for name, _ in self.named_parameters():
            yield append_prefix(prefix, name)

    @property
    def unsharded_module_type(self) -> type[CollectionByAccess]:
        return CollectionByAccess


class CollectionByAccessSharder(BaseEmbeddingSharder[CollectionByAccess]):
    """For modules that are CollectionByAccess, with the sharders that other collections have: their `fused_params` and codecs are
    used."""

    def __init__(
        self,
        ebc_sharder: EmbeddingBagCollectionSharder | None = None,
        ec_sharder: EmbeddingCollectionSharder | None = None,
    ) -> None:
        super().__init__()
        self.pooled = ebc_sharder or EmbeddingBagCollectionSharder()
        self.sequences = ec_sharder or EmbeddingCollectionSharder()

    def sharder_of(self, module: CollectionByAccess) -> Any:
        """The sharder of the collection inside."""
        return self.pooled if module.rows.pooled else self.sequences

    def shard(
        self,
        module: CollectionByAccess,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedCollectionByAccess:
        device = torch.device("cuda") if device is None else device
        return ShardedCollectionByAccess(module, params, self.sharder_of(module), env, device, module_fqn)

    def shardable_parameters(self, module: CollectionByAccess) -> dict[str, nn.Parameter]:
        found: dict[str, nn.Parameter] = self.sharder_of(module).shardable_parameters(module.inner)
        return found

    @property
    def module_type(self) -> type[CollectionByAccess]:
        return CollectionByAccess
