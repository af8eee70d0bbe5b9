"""How many CPU seconds pass on a CPU before the first response, with nothing compiled?

SmolLM2-135M in float32, in two settings, each with an empty cache folder:

    serve      `jsparse serve smollm2`: until /health returns 200, after two responses of 8 tokens,
               and once all compilation has ended
    prompts    one process that calls `jsparse.generate` with prompts and outputs of several
               lengths: CPU seconds and newly stored programs of each call, then the time to the
               first token of 512 tokens, all compiled

`--before` names a checkout of another revision, with its own environment in .venv, which is
measured in turn with this one.

    python -m bench.cold_start --before ../earlier --json build/cold_start.json

CPU seconds are those of all threads of the process.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from argparse import Namespace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

from bench.lib.arguments import report_parser
from bench.lib.environment import REPOSITORY, describe
from bench.lib.subprocesses import spread, write_report

# prompt tokens, new tokens
CALLS = ((3, 8), (40, 8), (300, 8), (10, 200), (600, 100))
# runs in either checkout, so it imports nothing from bench
PROMPTS = """
import json, os, sys, time
from pathlib import Path
import jsparse

calls, folder = json.loads(sys.argv[1]), Path(os.environ["JSPARSE_CACHE_DIR"], "programs")
stored = lambda: len([*folder.glob("*")]) if folder.exists() else 0
params, rows = jsparse.load("smollm2"), []
for prompt, new in calls:
    ids, cpu, before = [7 * i % 4000 + 10 for i in range(prompt)], time.process_time(), stored()
    jsparse.generate(params, ids, max_new_tokens=new, temperature=0, eos_token_id=[])
    cpu = time.process_time() - cpu
    time.sleep(2)  # programs are stored in the background
    rows.append({"prompt": prompt, "new": new, "cpu_seconds": cpu, "programs": stored() - before})
ids = [7 * i % 4000 + 10 for i in range(512)]
run = lambda: jsparse.generate(params, ids, max_new_tokens=2, max_length=1024, temperature=0)
run()
print(json.dumps({"calls": rows, "first_token": [run().stats.prefill_seconds for _ in range(5)]}))
"""


def start(checkout: Path, arguments: list[str], cache: str) -> subprocess.Popen[str]:
    """Starts Python in a checkout, with an empty folder for programs."""
    python = checkout / ".venv" / "bin" / "python"
    environment = os.environ | {"JSPARSE_CACHE_DIR": cache}
    return subprocess.Popen(
        [str(python), *arguments],
        cwd=checkout,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def cpu_seconds(process: subprocess.Popen[str]) -> float:
    """Returns the CPU seconds of a running process."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def prompts(checkout: Path) -> dict[str, Any]:
    """Measures the calls of `generate` in one process."""
    with tempfile.TemporaryDirectory() as cache:
        child = start(checkout, ["-c", PROMPTS, json.dumps(CALLS)], cache)
        output, _ = child.communicate(timeout=1800)
    return json.loads(output.splitlines()[-1])


def serve(checkout: Path, policy: str) -> dict[str, float]:
    """Measures a server from its start until all compilation has ended."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url, began = f"http://127.0.0.1:{port}", time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        arguments = ["-m", "jsparse", "serve", "smollm2", "--port", f"{port}", "--policy", policy]
        server = start(checkout, arguments, cache)
        try:
            while not healthy(url):
                if server.poll() is not None:
                    raise RuntimeError(f"{checkout}: the server exited with {server.returncode}")
                time.sleep(0.2)
            row = {"ready_seconds": time.monotonic() - began, "ready_cpu": cpu_seconds(server)}
            body = {"prompt": "Gravity is", "max_tokens": 8, "temperature": 0}
            for _ in range(2):
                ask(f"{url}/v1/completions", body)
            row["two_answers_cpu"] = cpu_seconds(server)
            before = -1.0
            while cpu_seconds(server) - before > 0.2:
                before = cpu_seconds(server)
                time.sleep(3)
            return row | {"at_rest_cpu": cpu_seconds(server)}
        finally:
            server.terminate()
            server.wait(60)


def healthy(url: str) -> bool:
    """Returns whether a server responds to requests."""
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
    except (HTTPError, URLError, OSError):
        return False


def ask(url: str, body: dict[str, Any]) -> None:
    """Sends a request and waits for the response."""
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=600).read()


def summary(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the medians of a checkout's runs."""
    served = {
        policy: {
            key: spread([run["serve"][policy][key] for run in measured])
            for key in measured[0]["serve"][policy]
        }
        for policy in measured[0]["serve"]
    }
    calls = [
        {
            "prompt": prompt,
            "new": new,
            "cpu_seconds": spread([r["prompts"]["calls"][nth]["cpu_seconds"] for r in measured]),
            "programs": measured[0]["prompts"]["calls"][nth]["programs"],
        }
        for nth, (prompt, new) in enumerate(CALLS)
    ]
    times = [seconds for run in measured for seconds in run["prompts"]["first_token"]]
    return {"serve": served, "calls": calls, "first_token_seconds": spread(times)}


def print_summary(name: str, row: dict[str, Any]) -> None:
    """Prints the medians of a checkout."""
    for policy, of in row["serve"].items():
        print(
            f"{name}: serve {policy}: ready after {of['ready_cpu']['median']:.0f} CPU s, "
            f"at rest after {of['at_rest_cpu']['median']:.0f}"
        )
    for call in row["calls"]:
        print(
            f"{name}: {call['prompt']} + {call['new']} tokens: "
            f"{call['cpu_seconds']['median']:.1f} CPU s, {call['programs']} programs"
        )
    print(f"{name}: first of 512 tokens after {row['first_token_seconds']['median']:.2f} s")


def arguments() -> Namespace:
    """Parses the command line."""
    parser = report_parser("cold_start", str(__doc__).partition("\n")[0])
    parser.add_argument("--before", type=Path, help="a checkout of another revision")
    parser.add_argument("--policies", nargs="+", default=["dense", "quest(budget=1024)"])
    parser.add_argument("--runs", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    """Measures the checkouts in turn, prints the medians and writes the report."""
    given = arguments()
    environment = describe(allow_modified=given.allow_modified)
    checkouts = {"now": REPOSITORY}
    if given.before is not None:
        checkouts = {"before": given.before.resolve(), **checkouts}
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
    for _ in range(given.runs):
        for name, checkout in checkouts.items():
            served = {policy: serve(checkout, policy) for policy in given.policies}
            measured[name].append({"serve": served, "prompts": prompts(checkout)})
        rows = {name: summary(runs) for name, runs in measured.items() if runs}
        write_report(given.json, {"environment": environment, "results": rows, "runs": measured})
    for name, row in rows.items():
        print_summary(name, row)


if __name__ == "__main__":
    sys.exit(main())
