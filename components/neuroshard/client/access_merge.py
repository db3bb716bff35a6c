"""The samples of all ranks -> how each table is read, counted in the background of a trainer.

Steps are numbered from 0 on each rank, and handed over in blocks. The tables are dealt out to the ranks, each of which counts its
own: it takes the block of every rank, and adds the ranks' samples of a step up to one global batch. Blocks travel through the
key-value store of torch.distributed (ranks.py), under a prefix that rank 0 makes for this run, so nothing of a run before counts:

    block/<b>/<from>/<to>/<i>    parts of a block, from each rank to each that counts; deleted once it was taken
    taken/<b>/<to>               every rank may send block b + 2, so at most two wait in the key-value store
    result/<w>/<rank>/<i>        for write w: the tables that a rank counted, and lists of their hot rows, taken by rank 0
    written/<w>                  what came of write w on rank 0: empty if it is in the store
"""

import atexit
import json
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from neuroshard.client.access_blocks import Block, Merged, Taken
from neuroshard.client.access_sample import SAMPLED_A_STEP, Batch, Sample, Sampler
from neuroshard.client.ranks import MARGIN_SECONDS, PART_BYTES, Channel, ChannelClosed
from neuroshard.core.counted import CountedAccess
from neuroshard.core.errors import NeuroshardError
from neuroshard.core.table import Table
from neuroshard.core.text import counted, one_line
from neuroshard.core.value import timestamp

BLOCK_STEPS = 64  # of a block at least: one message to each rank that counts, however short the steps are
MOST_QUEUED = 128  # steps that wait for the background thread; later ones are left out
PATIENCE_SECONDS = 300.0  # for another rank; ranks start minutes apart, and a checkpoint may keep one from counting
MOST_COUNTERS = 64  # ranks that count: so a block is at most so many messages


class Write(NamedTuple):
    """In the queue of steps: before `step`, rank 0 is to write what was counted, as the `number`th write; others wait so long."""

    number: int
    step: int
    wait_seconds: float


class Step(NamedTuple):
    """In the queue of steps: the batch of the step `number`."""

    number: int
    batch: Batch


class Ended(Exception):
    """Counting ends, for a reason that all ranks have; `own` where this rank is to report it."""

    def __init__(self, why: str, own: bool) -> None:
        super().__init__(why)
        self.own = own


class Background:
    """Counts in a thread of its own what `put` gives it, until a fault ends it; `fault` is then the reason to report, "" where
    another rank reports it."""

    def __init__(
        self,
        sampler: Sampler,
        channel: Channel | None,
        rank: int,
        ranks: int,
        model: str,
        store_it: Callable[[CountedAccess, Sequence[bytes]], str],
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self.sampler, self.rank, self.ranks, self.model = sampler, rank, ranks, model
        self.store_it, self.patience = store_it, patience_seconds
        tables = len(sampler.readings)
        self.counting = range(min(ranks, tables, MOST_COUNTERS))  # ranks that count
        self.dealt = [range(rank, tables, len(self.counting)) for rank in self.counting]
        self.merged = Merged(sampler.readings, self.dealt[rank]) if rank in self.counting else None
        self.block_steps = BLOCK_STEPS * -(-ranks // BLOCK_STEPS)
        self.steps: queue.SimpleQueue[Step | Write | None] = queue.SimpleQueue()
        self.ended, self.failed, self.fault = threading.Event(), "", ""
        self.written: dict[int, str] = {}
        self.finished = threading.Condition()
        self._meeting, self.channel = channel, channel
        self._block, self._sent = Block(0), 0
        self.run_id = secrets.token_hex(8)
        self.thread = threading.Thread(target=self._run, name="neuroshard access counts", daemon=True)
        atexit.register(self.leave)
        self.thread.start()

    def leave(self) -> None:
        """End the thread before the interpreter does: in a call of torch's it would abort the process as it is ended."""
        if self._meeting is not None:
            self._meeting.closed.set()
        self.steps.put(None)
        self.thread.join(MARGIN_SECONDS)

    def put(self, item: Step | Write) -> None:
        """Hand a step over, or leave it out where too many wait."""
        if isinstance(item, Write) or self.steps.qsize() < MOST_QUEUED:
            self.steps.put(item)

    def wait(self, write: int, seconds: float) -> str | None:
        """What came of a write; None where it is not known in time."""
        ends = time.monotonic() + seconds
        with self.finished:
            while write not in self.written and not self.ended.is_set() and (left := ends - time.monotonic()) > 0:
                self.finished.wait(left)
        return self.written.get(write)

    def stop(self, why: str = "") -> None:
        """End the thread, and counting on all ranks if there is a reason."""
        self.failed = self.failed or why
        self.steps.put(None)

    def _run(self) -> None:
        try:
            self._meet()
            while (item := self.steps.get()) is not None:
                if isinstance(item, Write):
                    self._take_write(item)
                else:
                    self._take(item)
            if self.failed:
                raise Ended(f"rank {self.rank}: {self.failed}", own=True)
        except ChannelClosed:
            pass
        except Ended as end:
            self._end(str(end), end.own)
        except NeuroshardError as error:
            self._end(str(error), own=self.rank == 0)
        except BaseException as error:
            self._end(f"rank {self.rank}: {type(error).__name__}: {one_line(error)}", own=True)
        finally:
            atexit.unregister(self.leave)
            self.ended.set()
            with self.finished:
                self.finished.notify_all()

    def _end(self, why: str, own: bool) -> None:
        self.fault = why if own else ""
        self.ended.set()
        if own and self.channel is not None:
            block = Block(self._block.first, ended=why)
            with suppress(NeuroshardError):
                for to in self.counting:
                    if to != self.rank:
                        self._send(f"block/{self._sent}/{self.rank}/{to}", block.to_bytes(()))

    def _meet(self) -> None:
        """All ranks learn the run's prefix from rank 0 (see Channel.welcome)."""
        if self._meeting is None:
            return
        channel, self.channel = self._meeting, None
        if self.rank == 0:
            if late := channel.welcome(range(1, self.ranks), self.run_id, self.patience):
                raise Ended(f"rank {late[0]} does not count; every rank must make an AccessCounts", own=True)
        else:
            token = secrets.token_hex(8)
            channel.write(f"hello/{self.rank}", token)
            if channel.wait([f"welcome/{token}"], self.patience):
                raise Ended("rank 0 does not count; every rank must make an AccessCounts", own=self.rank == 1)
            self.run_id = channel.read(f"welcome/{token}").decode()
            channel.under(self.run_id).write(f"answer/{self.rank}", "")
        self.channel = channel.under(self.run_id)

    def _take(self, step: Step) -> None:
        """Put a step into its block."""
        self._up_to(step.number)
        sample = step.batch.sample()
        self._block.steps += 1
        if sample is None:
            self._block.left_out = True
        else:
            self._block.samples.append(sample)
        if step.number + 1 == self._end_of_block:
            self._close()

    def _take_write(self, write: Write) -> None:
        self._up_to(write.step)
        self._close(write.number)
        if self.merged is not None:
            self._write(self.merged, write.number)
        if self.rank and self.channel is not None and write.wait_seconds > 0:
            self.channel.wait([f"written/{write.number}"], write.wait_seconds)
            self._finish(write.number, "")

    def _up_to(self, step: int) -> None:
        """Close the blocks before a step, and leave out those with steps that this rank was too slow for."""
        while step >= self._end_of_block:
            self._block.left_out = True  # else its last step had closed it
            self._block.steps = self._end_of_block - self._block.first
            self._close()
        missing = step - self._block.first - self._block.steps
        self._block.left_out |= missing > 0
        self._block.steps += missing

    @property
    def _end_of_block(self) -> int:
        """Blocks end at multiples of the same steps on all ranks, and at writes."""
        return (self._block.first // self.block_steps + 1) * self.block_steps

    def _close(self, write: int = -1) -> None:
        block, number = self._block, self._sent
        block.write = write
        self._block, self._sent = Block(block.first + block.steps), number + 1
        self._use_smaller_shares(block.samples)
        own = {to: block.to_bytes(self.dealt[to]) for to in self.counting}
        if self.channel is not None:
            if number >= 2 and self.channel.wait([f"taken/{number - 2}/{to}" for to in self.counting], self.patience):
                raise Ended(f"no rank took block {number - 2} within {self.patience:g} s", own=False)
            for to in self.counting:
                if to != self.rank:
                    self._send(f"block/{number}/{self.rank}/{to}", own[to])
        if self.merged is not None:
            self._count(self.merged, number, own[self.rank])

    def _use_smaller_shares(self, samples: Sequence[Sample]) -> None:
        """Later batches may look up more rows than the first."""
        if samples:
            mean = np.mean([[len(rows) for rows in sample.rows] for sample in samples], axis=0)
            if many := np.flatnonzero(mean > 2 * SAMPLED_A_STEP).tolist():
                self.sampler.halve(many)

    def _count(self, merged: Merged, number: int, own: bytes) -> None:
        """Take block `number` of all ranks, and count it."""
        blocks = []
        for rank in range(self.ranks):
            data = own if rank == self.rank else self._receive(f"block/{number}/{rank}/{self.rank}", rank)
            block = Taken.of(data)
            if block.header["ended"]:
                raise Ended(block.header["ended"], own=self.rank == 0)
            blocks.append(block)
        if self.channel is not None:
            self.channel.write(f"taken/{number}/{self.rank}", "")
            if number >= 2:  # every rank has sent a later block, so it has seen this
                self.channel.delete([f"taken/{number - 2}/{self.rank}"])
        spans = [tuple(block.header[name] for name in ("first", "steps", "write")) for block in blocks]
        if len(set(spans)) > 1:
            other = next(rank for rank, span in enumerate(spans) if span != spans[0])
            raise Ended(
                f"ranks 0 and {other} differ in their steps (steps {spans[0][0]}+{spans[0][1]} and {spans[other][0]}+"
                f"{spans[other][1]}); every rank must call add once a step, and write after the same steps",
                own=self.rank == 0,
            )
        merged.add(blocks)

    def _write(self, merged: Merged, number: int) -> None:
        """Rank 0 gathers what all ranks counted, and writes it."""
        now = timestamp(datetime.now(UTC))
        how_much = f"{counted(merged.steps, 'step')} of {counted(merged.batch_size, 'sample')} on {counted(self.ranks, 'rank')}"
        source = f"counted by trainers: {how_much} up to {now}"
        own, lists = merged.tables(source, now) if merged.steps else ([], [])
        if self.rank:
            header = {"tables": [table.model_dump(mode="json") for table in own], "lists": [len(one) for one in lists]}
            self._send(f"result/{number}/{self.rank}", b"\n".join([json.dumps(header).encode(), b"".join(lists)]))
            return
        tables: list[Table | None] = [None] * len(self.sampler.readings)
        for rank, places in enumerate(self.dealt):
            found = own
            if rank:
                head, _, body = self._receive(f"result/{number}/{rank}", rank).partition(b"\n")
                header = json.loads(head)
                found = [Table.parse(table, f"what rank {rank} counted") for table in header["tables"]]
                ends = [*accumulate(header["lists"], initial=0)]
                lists += [body[begin:end] for begin, end in pairwise(ends)]
            for place, table in zip(places, found, strict=False):
                tables[place] = table
        outcome = "no step was counted yet"
        if all(tables) and merged.steps:
            fields = {
                "model": self.model,
                "run": self.run_id,
                "ranks": self.ranks,
                "steps": merged.steps,
                "left_out_steps": merged.left_out,
                "batch_size": merged.batch_size,
                "time": now,
                "tables": tables,
                "notes": merged.notes,
            }
            try:
                outcome = self.store_it(CountedAccess.parse(fields, "what was counted"), lists)
            except NeuroshardError as error:  # a later write may succeed
                outcome = f"cannot write: {error}"
        self._finish(number, outcome)
        if self.channel is not None:
            self.channel.write(f"written/{number}", outcome)

    def _finish(self, number: int, outcome: str) -> None:
        with self.finished:
            self.written[number] = outcome
            self.finished.notify_all()

    def _send(self, key: str, data: bytes) -> None:
        assert self.channel is not None
        parts = [data[i : i + PART_BYTES] for i in range(0, len(data), PART_BYTES)]
        for number in reversed(range(len(parts))):  # the first says how many there are
            before = f"{len(parts)}\n".encode() if number == 0 else b""
            self.channel.write(f"{key}/{number}", before + parts[number])

    def _receive(self, key: str, rank: int) -> bytes:
        assert self.channel is not None
        if self.channel.wait([f"{key}/0"], self.patience):
            raise Ended(f"rank {rank} sent nothing for {self.patience:g} s", own=self.rank == 0)
        count, _, first = self.channel.read(f"{key}/0").partition(b"\n")
        names = [f"{key}/{number}" for number in range(int(count))]
        data = b"".join([first, *(self.channel.read(name) for name in names[1:])])
        self.channel.delete(names)
        return data
