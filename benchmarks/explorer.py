"""How fast the explorer answers: an image's spotlights, the levers, and many clients at once.

    python benchmarks/explorer.py --run DIR [--seconds 60] [--clients 20]

DIR is a memory with a recipe (`dualform demo --steps 3000 --out DIR` makes the paper's 384,000 events). The server runs
in a process of its own, as `dualform serve` does; every time is from the request to the whole answer, over loopback.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from machine import machine


def ask(address: str, **parameters: Any) -> tuple[float, dict[str, Any]]:
    """Milliseconds, and the answer."""
    query = "&".join(f"{name}={value}" for name, value in parameters.items())
    request = urllib.request.Request(f"{address}images?{query}", headers={"accept": "application/json"})
    start = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as answer:
        content = answer.read()
    return 1e3 * (time.perf_counter() - start), json.loads(content)


def say(title: str, times: list[float], goal: str = "") -> None:
    ordered = sorted(times)
    p95 = ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))]
    print(
        f"{title:46} p50 {statistics.median(times):8.1f}   p95 {p95:8.1f} ms   {len(times):4} asked   {goal}",
        flush=True,
    )


def resident(process: int) -> float:
    """The resident memory of a process in MB."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def crowd(address: str, process: int, clients: int, seconds: float, images: int) -> None:
    """So many clients ask one question after the other."""
    end, times, problems, peak = time.perf_counter() + seconds, [], [], 0.0
    lock = threading.Lock()

    def client(seed: int) -> None:
        chance = random.Random(seed)
        while time.perf_counter() < end:
            try:
                taken, _ = ask(address, test=chance.randrange(images))
                with lock:
                    times.append(taken)
            except (OSError, urllib.error.URLError) as problem:
                with lock:
                    problems.append(str(problem))

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        peak = max(peak, resident(process))
        time.sleep(0.2)
    say(f"{clients} clients for {seconds:.0f} s", times, f"{len(problems)} errors, {len(times) / seconds:.0f} a second")
    print(f"{'resident memory of the server':46} at most {peak:,.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=20)
    options = parser.parse_args()
    print(f"machine: {machine()}")
    command = [sys.executable, "-u", "-m", "dualform", "serve", str(options.run), "--no-browser", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        while "http://127." not in line:
            line = server.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1\S*/", line)
        assert found is not None
        measure(found[0], server.pid, options)
    finally:
        server.terminate()
        server.wait(30)


def measure(address: str, process: int, options: argparse.Namespace) -> None:
    with urllib.request.urlopen(f"{address}about.json", timeout=60) as answer:
        setting = json.load(answer)["images"]
    steps, chance = setting["steps"], random.Random(0)
    images = 10_000 if setting["height"] == 28 else 300
    first, _ = ask(address, test=0)
    print(f"{'the very first image':46}     {first:8.1f} ms")
    # What is derived is made now, unless it is there already.
    print(f"{'the first mask':46}     {ask(address, test=0, without='3')[0]:8.1f} ms")
    print(f"{'the first earlier step':46}     {ask(address, test=0, until=steps - 1)[0]:8.1f} ms")
    kept = [path for name in ("folds", "keyframes") for path in (options.run / "derived" / name).rglob("*.safetensors")]
    print(f"{'which are kept in derived/':46}     {sum(path.stat().st_size for path in kept) / 1e6:8.0f} MB")
    for _ in range(20):
        ask(address, test=chance.randrange(images))
    say("an image's spotlights on all layers", [ask(address, test=chance.randrange(images))[0] for _ in range(200)],
        "goal 80 / 250")  # fmt: skip
    say("contributions to the answer", [ask(address, test=chance.randrange(images), measure="contributions")[0]
                                        for _ in range(30)])  # fmt: skip
    for part in ("scores", "timeline"):
        ask(address, test=0, part=part)
        say(f"the chart of {part}", [ask(address, test=chance.randrange(images), part=part)[0] for _ in range(10)])
    # Never the same step or mask twice, so that no model is at hand.
    whole = chance.sample(range(1, steps), 40)
    masks = [",".join(map(str, sorted(chance.sample(range(10), size)))) for size in (1, 2, 3, 4, 5, 6, 7, 8, 9)]
    say("time alone", [ask(address, test=7, until=step)[0] for step in whole[:15]], "goal 1,000")
    say("a mask alone", [ask(address, test=7, without=mask)[0] for mask in dict.fromkeys(masks)], "goal 1,000")
    both = [ask(address, test=7, until=step, without=mask)[0] for step, mask in zip(whole[15:], masks, strict=False)]
    say("both together", both, "goal 5,000")
    crowd(address, process, options.clients, options.seconds, images)


if __name__ == "__main__":
    main()
