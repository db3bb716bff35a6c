"""The bench of a run on this machine: hardware, settings, versions, and how its labels are made."""

from neuroshard import __version__
from neuroshard.core.case import Cases
from neuroshard.core.cost import Bench, Hardware
from neuroshard.core.errors import MeasureError
from neuroshard.core.units import format_bytes
from neuroshard.core.versions import Installed
from neuroshard.devices import POD_CPU
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.machine import Machine
from neuroshard.measure.rowcap import capped_tables, least_cap
from neuroshard.measure.timing.all_to_all import (
    AGREEMENT,
    BACKWARDS,
    BURSTS,
    COLLECTIVES,
    LONG_SECONDS,
    MOST_BURSTS,
)


def bench_of(machine: Machine, cases: Cases, settings: MeasureSettings, begun: Bench | None) -> Bench:
    """The conditions of this run. A run that continues keeps the memory limit of `begun`, unless the settings give another."""
    limit = settings.memory_limit_bytes or (
        machine.memory_limit(settings.budget_seconds) if begun is None else begun.memory_limit_bytes
    )
    found = machine.hardware()
    hardware = wanted_hardware(found, settings.hardware)
    return Bench(
        backend=machine.kind,
        hardware=hardware,
        batch_size=settings.batch_size,
        warmup=settings.warmup,
        repeats=settings.repeats,
        optimizer=settings.optimizer,
        threads=settings.threads,
        seed=settings.seed,
        memory_limit_bytes=limit,
        row_cap_bytes=least_cap(cases.compute, settings.optimizer, limit),
        capped_tables=capped_tables(cases.compute, settings.optimizer, limit),
        versions=installed_versions(),
        facts=machine.facts() | ({"cpu": found.name} if hardware.name == POD_CPU else {}),
        notes=(
            *machine.notes(),
            machine.label_note(settings.repeats),
            f"the label of an all-to-all is the median of {BURSTS * settings.repeats} forwards, and of {BACKWARDS} times "
            f"as many backwards; of up to {MOST_BURSTS * settings.repeats} forwards while the fastest differ by more than "
            f"{AGREEMENT:.0%}; of at least {settings.repeats} if they take longer than {LONG_SECONDS:g} s",
            f"all-to-alls in fp32 over {COLLECTIVES[machine.kind]}, all devices on one host",
            "lookups from traces" if settings.traces else "lookups drawn to match the tables' reuse bins",
        ),
    )


def wanted_hardware(found: Hardware, wanted: Hardware | None) -> Hardware:
    """The hardware that was found here. Raises MeasureError if it is of another kind than `wanted`."""
    if wanted is None:
        return found
    found = with_hidden_facts(found, wanted)
    if found.fingerprint != wanted.fingerprint:
        raise MeasureError(
            f"{wanted.name} was to be measured ({_facts(wanted)}), but this machine has {found.name} ({_facts(found)}): correct "
            "the node's labels, or the node selector"
        )
    return found


def with_hidden_facts(found: Hardware, known: Hardware) -> Hardware:
    """The hardware found here, with what is `known` otherwise: the machine's name, which a container hides, and the sharing,
    which is invisible from inside. Of pods' CPUs only what was asked for is known: which one is here is a fact of the bench."""
    if found.kind == "cpu" and known.name == POD_CPU:
        return known
    return found.model_copy(update={"machine": found.machine or known.machine, "sharing": known.sharing})


def _facts(hardware: Hardware) -> str:
    facts = (
        format_bytes(hardware.memory_bytes),
        hardware.driver and f"driver {hardware.driver}",
        hardware.compute_capability and f"compute {hardware.compute_capability}",
        hardware.machine,
    )
    return ", ".join(filter(None, facts))


def installed_versions() -> dict[str, str]:
    """Versions of the packages that times depend on."""
    here = Installed.here()
    return {"neuroshard": __version__, **({"torch": here.torch} if here.torch else {}), **here.fbgemm}
