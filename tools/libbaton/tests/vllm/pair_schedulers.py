"""vLLM's own scheduler in both roles, of 0.32 and of 0.33, with real connectors.

0.33 has no build for CPUs. Its sources are unpacked beside the other vLLM, without compiled parts.
"""
import functools, os, re, subprocess, zipfile

import calls
from behind import CACHE, check
from pair_servers import MODULES, PYTHON, TESTS, make_model

ROUNDS = 600
OCCUR = ["d aborted while RUNNING", "d aborted while WAITING_FOR_REMOTE_KVS",
         "p aborted while RUNNING", "p aborted while WAITING", "decode: error", "decode: length",
         "failed loads", "loaded", "never asked", "resumed", "unknown room"]
MISTAKES = ["reported_twice", "freed_early", "failures_unsaid", "never_reported"]


def sources(version):
    """A folder with the Python files of a version."""
    folder = CACHE / f"vllm-{version}"
    if (folder / "vllm").exists():
        return folder
    made = folder.with_suffix(".new")
    subprocess.run([PYTHON, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
                    "--no-deps", "--dest", made, f"vllm=={version}"], check=True)
    wheel, = made.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(made, [one for one in packed.namelist() if not one.endswith(".so")])
    wheel.unlink()
    made.rename(folder)
    return folder


def drive(pair, folder, *words):
    path = ":".join(str(one) for one in (folder, MODULES) if one)
    environment = {
        **os.environ, "PYTHONPATH": path, "BATON_LIBRARY": str(pair.options.library),
        "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return subprocess.run(
        [PYTHON, TESTS / "real_scheduler.py", make_model("tiny"), *words], env=environment,
        text=True, capture_output=True, timeout=600)


def schedulers(pair, version):
    folder = sources(version) if version != "0.32.0" else None
    done = drive(pair, folder, str(ROUNDS))
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"vLLM {version}" in done.stdout, done.stdout
    found = {name: int(count) for count, name in re.findall(r"^ *(\d+) (.*)$", done.stdout, re.M)}
    missing = [name for name in OCCUR if not found.get(name)]
    assert not missing, f"did not occur: {missing}"
    called = set(re.findall(r"^call (.*)$", done.stdout, re.M))
    orders = calls.compare(f"scheduler-{version}", called, pair.options.record)
    for mistake in MISTAKES:
        wrong = drive(pair, folder, "200", mistake)
        assert wrong.returncode == 1 and "AssertionError" in wrong.stderr, (
            mistake, wrong.stdout, wrong.stderr[-500:])
    return ", ".join(f"{found[name]} {name}" for name in OCCUR) + (
        f"; {orders} orders of calls, {len(MISTAKES)} mistakes found")


for one in ("0.32.0", "0.33.0"):
    run = functools.partial(schedulers, version=one)
    run.__name__ = f"the_scheduler_of_vllm_{one.replace('.', '_')}_in_both_roles"
    check(run)
