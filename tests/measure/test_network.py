"""`neuroshard network`: several hosts measure together what joins them, on namespaces where the machine allows it."""

import json
import os
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from helpers.forked import run_scripts
from helpers.hosts import enter, hosts, lacks_hosts
from helpers.loopback import NETLOC, bound, port_of
from helpers.refusals import refused
from neuroshard import cli
from neuroshard.core.errors import MeasureError, UsageError
from neuroshard.core.topology import topology_of
from neuroshard.core.units import parse_network
from neuroshard.measure import network
from neuroshard.measure.network import NetworkFigures, NetworkSettings, Pattern, Place, fitted, run


def settings(**more: object) -> NetworkSettings:
    given = {"hosts": 2, "host": 0, "ranks": 2, "address": "127.0.0.1:29400", "kind": "cpu"}
    return NetworkSettings(**{**given, **more})  # type: ignore[arg-type]


def sent(pattern: Pattern, nbytes: int = 2400) -> list[list[int]]:
    """Bytes from each of 6 ranks, in domains of 2, to each."""
    places = [Place(rank, rank % 2, 6, 2) for rank in range(6)]
    return [[place.bytes_to(peer, pattern, nbytes, place.rank) for peer in range(6)] for place in places]


def test_each_pattern_sends_its_bytes_where_it_says() -> None:
    assert sent("near") == [[2400 * (peer != r and peer // 2 == r // 2) for peer in range(6)] for r in range(6)]
    assert sent("far") == [[600 * (peer // 2 != r // 2) for peer in range(6)] for r in range(6)]
    assert sent("all") == [[480 * (peer != r) for peer in range(6)] for r in range(6)]
    assert [sum(row) for row in sent("alone")] == [2400, 0, 2400, 0, 2400, 0]


def test_the_smallest_all_to_all_is_the_latency_and_the_largest_gives_the_rate() -> None:
    line = fitted({1000: 0.5, 4000: 0.6, 1_001_000: 2.5})
    assert line is not None
    assert (line.latency_ms, line.bytes_per_s, line.nbytes) == (0.5, pytest.approx(5e8), 1_001_000)
    assert fitted({1000: 0.5}) is None
    assert fitted({1000: 0.5, 4000: 0.4}) is None


def test_what_it_prints_is_what_a_search_takes() -> None:
    far = {4096: 0.125, 2**28: 0.125 + 1e3 * (2**28 - 4096) / 43.1e9}
    figures = NetworkFigures(settings(), {"far": far, "alone": far})
    assert figures.text == "43.1GB/s,0.125ms"
    topology = topology_of(4, 2, None, figures.text)
    assert topology is not None
    assert (topology.network_bytes_per_s, topology.network_latency_ms) == (43.1e9, 0.125)
    assert any("--network 43.1GB/s,0.125ms" in line for line in figures.lines())
    assert any("a port for each" in line for line in figures.lines())
    slower = {size: ms if size < 2**20 else 2 * ms for size, ms in far.items()}
    assert any("share ports" in line for line in NetworkFigures(settings(), {"far": slower, "alone": far}).lines())


@pytest.mark.parametrize(
    ("bytes_per_s", "latency_ms", "text"),
    [
        (999.7e6, 0.0612, "1GB/s,0.0612ms"),
        (1.2345e12, 0.00001, "1230GB/s,0.00001ms"),
        (43.06e9, 1234.0, "43.1GB/s,1230ms"),
        (123_456.0, 999.9, "123KB/s,1000ms"),
        (999.9, 100.0, "1KB/s,100ms"),
        (4567.0e12, 1.5e-7, "4570000GB/s,0.00000015ms"),
    ],
)
def test_a_search_takes_what_it_prints_of_any_network(bytes_per_s: float, latency_ms: float, text: str) -> None:
    far = {4096: latency_ms, 2**28: latency_ms + 1e3 * (2**28 - 4096) / bytes_per_s}
    figures = NetworkFigures(settings(), {"far": far})
    assert figures.text == text
    rate, latency = parse_network(text)
    assert (rate, latency) == (pytest.approx(bytes_per_s, rel=0.01), pytest.approx(latency_ms, rel=0.01))
    [line] = [line for line in figures.lines() if line.startswith("to other domains")]
    assert "{} a rank and {} (".format(*text.replace("ms", " ms").split(",")) in line


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"host": 2}, ("--host 2", "2 hosts")),
        ({"host": -1}, ("--host -1",)),
        ({"address": "localhost"}, ("localhost", "HOST:PORT")),
        ({"address": "localhost:99999"}, ("99999",)),
        ({"domain": 4}, ("one domain", "--hosts")),
        ({"domain": 3}, ("3 ranks",)),
        ({"kind": "tpu"}, ("tpu", "cuda")),
    ],
)
def test_hosts_that_cannot_be_are_refused(given: dict[str, object], said: tuple[str, ...]) -> None:
    with refused(UsageError, *said):
        settings(**given)


def test_an_address_that_does_not_resolve_is_refused_at_once() -> None:
    with refused(MeasureError, "nowhere.invalid", "host 0"):
        run(NetworkFigures(settings(address="nowhere.invalid:29400"), {}))


@pytest.fixture
def address() -> str:
    with bound() as one:
        return f"{NETLOC}:{port_of(one)}"


class Ends(dict[Pattern, dict[int, float]]):
    """Figures of a host that is gone once it has measured between domains."""

    def __setitem__(self, pattern: Pattern, ms: dict[int, float]) -> None:
        if pattern != "far":
            raise ConnectionError("this host is gone")
        super().__setitem__(pattern, ms)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_all_hosts_read_the_same_figures_and_one_that_ends_is_noticed(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr(network, "SIZES", (2**12, 2**20))
    found = [
        NetworkFigures(settings(host=host, address=address, timeout_seconds=20, meet_seconds=60), {})
        for host in range(2)
    ]
    asked = [threading.Thread(target=run, args=(figures,)) for figures in found]
    for one in asked:
        one.start()
    for one in asked:
        one.join()
    assert found[0].ms == found[1].ms
    assert {pattern: set(ms) for pattern, ms in found[0].ms.items()} == {
        pattern: {2**12, 2**20} for pattern in network.PATTERNS
    }
    assert found[0].overlap is not None

    left, gone = NetworkFigures(found[0].settings, {}), NetworkFigures(found[1].settings, Ends())

    def go() -> None:
        with pytest.raises(ConnectionError):
            run(gone)

    other = threading.Thread(target=go)
    other.start()
    with refused(MeasureError, "another host ended"):
        run(left)
    other.join()
    assert left.text is not None


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_network_of_known_speed_is_measured_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why := lacks_hosts():
        pytest.skip(why)
    monkeypatch.setattr(network, "SIZES", [size for size in network.SIZES if size <= 2**22])

    def on(namespace: str, host: int) -> int:
        enter(namespace)
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        sys.argv += ["--host", str(host)]
        cli.main()
        return 0

    with hosts(2, 1, "20mbit") as there:
        given = ("network", "--hosts", 2, "--ranks", 2, "--address", f"{there[0].address}:29400", "--backend", "cpu")
        done = run_scripts(
            [partial(on, one.namespace, host) for host, one in enumerate(there)],
            *(*given, "--json"),
            cwd=tmp_path,
            environments=[{}] * 2,
        )
    assert [one.returncode for one in done] == [0, 0], done[0].stderr
    said = [one.stdout for one in done]
    assert said[0] == said[1]
    figures = json.loads(said[0])
    lines, port = figures["lines"], 20e6 / 8
    # two ranks share a host's port; a token bucket lets a first 256 KiB pass
    assert 0.5 * port / 2 < lines["far"]["bytes_per_s"] < 1.3 * port / 2
    assert 0.5 * port < lines["alone"]["bytes_per_s"] < 1.5 * port
    assert lines["alone"]["bytes_per_s"] > 1.25 * lines["far"]["bytes_per_s"]
    assert lines["near"]["bytes_per_s"] > 2 * port
