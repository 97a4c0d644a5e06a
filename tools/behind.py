"""Shared by the scripts that run Baton workers behind a foreign router.

Owns: processes, requests, the comparison with
`baton serve` for the same body, and the checks, one line each.
"""
import contextlib, http.client, json, os, pathlib, re, signal, socket, subprocess, sys, tempfile
import time, traceback

ROOT = pathlib.Path(__file__).resolve().parent.parent
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "baton"
MODEL = CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf"
SECONDS = 120  # Longer than any step here takes.
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


# --- processes ---------------------------------------------------------------------------------

def free_port(host="127.0.0.1"):
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


class Process:
    """A child with its log in a file. `port` is its HTTP port, the same after a restart."""

    def __init__(self, name, command, port, folder, host="127.0.0.1"):
        self.name, self.command, self.port, self.host = name, command, port, host
        self.log = pathlib.Path(folder) / f"{name}.log"
        self.child = None

    def start(self):
        with open(self.log, "ab") as log:
            self.child = subprocess.Popen([str(word) for word in self.command], stdout=log,
                                          stderr=log)
        return self

    def await_status(self, path="/health", status=200):
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            if self.child.poll() is not None:
                break
            with contextlib.suppress(OSError, http.client.HTTPException):
                if ask(self, "GET", path).status == status:
                    return self
            time.sleep(0.1)
        raise AssertionError(f"{self.name} is not ready: {self.last_words()}")

    def kill(self):
        self.child.kill()
        self.child.wait()

    def end(self):
        """Ends it with SIGTERM, as an operator does. Returns its exit status."""
        self.child.send_signal(signal.SIGTERM)
        try:
            return self.child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def last_words(self):
        if not self.log.exists():
            return "nothing logged"
        return self.log.read_text(errors="replace")[-2000:]


class Answer:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    def json(self):
        assert 200 <= self.status < 300, f"status {self.status}: {self.body[:400]!r}"
        return json.loads(self.body)

    def events(self):
        """The data of each event of a stream, which must end with [DONE]."""
        assert self.status == 200, f"status {self.status}: {self.body[:400]!r}"
        kind = self.headers["content-type"]
        assert kind.startswith("text/event-stream"), kind
        events = [part[6:] for part in self.body.decode().split("\n\n") if part]
        assert events[-1] == "[DONE]", events[-1]
        return [json.loads(event) for event in events[:-1]]


def ask(server, method, path, body=None, headers={}):
    connection = http.client.HTTPConnection(server.host, server.port, timeout=SECONDS)
    try:
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(
            method, path, raw,
            {"content-type": "application/json", **headers} if raw is not None else headers)
        answer = connection.getresponse()
        return Answer(answer.status, answer.headers, answer.read())
    finally:
        connection.close()


class Cluster:
    """Workers and a reference process (`serve`). `front` is the router over the workers."""

    def __init__(self, baton, model, folder):
        self.baton, self.model, self.folder = baton, model, folder
        self.processes = []

    def add(self, process):
        self.processes.append(process)
        return process.start()

    def worker(self, role, name, host="127.0.0.1", more=()):
        port = free_port(host)
        command = [self.baton, role, self.model, "--host", host, "--port", port,
                   "--served-model-name", "smol",
                   "--kv-memory", "256MiB", "--threads", "1", *more]
        return self.add(Process(name, command, port, self.folder, host))

    def end(self):
        return {process.name: process.end() for process in reversed(self.processes)
                if process.child.poll() is None}


# --- requests -----------------------------------------------------------------------------------

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
# Valid ids also in the vocabularies of the models that replay recordings.
IDS = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57]

CHAT, COMPLETION, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


def chat(**more):
    return CHAT, {"model": "smol", "messages": QUESTION, "max_tokens": 12, "temperature": 0, **more}


def completion(**more):
    return COMPLETION, {"model": "smol", "prompt": "Once upon a time", "max_tokens": 12,
                        "temperature": 0, **more}


def generate(sampling={}, **more):
    sampling = {"max_new_tokens": 12, "temperature": 0, **sampling}
    prompt = {} if "text" in more else {"input_ids": IDS}
    return GENERATE, {**prompt, "sampling_params": sampling, **more}


def streamed(request):
    path, body = request
    return path, {**body, "stream": True}


def essence(path, answer):
    """The parts of an answer that are equal for equal bodies: no names, times or cache counts."""
    if path == GENERATE:
        one = lambda item: [item["text"], item["output_ids"]] + [
            item["meta_info"][name]
            for name in ("prompt_tokens", "completion_tokens", "finish_reason")]
        return [one(item) for item in answer] if isinstance(answer, list) else one(answer)
    usage = answer["usage"]
    return [answer["model"], answer["object"],
            sorted(answer["choices"], key=lambda choice: choice["index"]),
            [usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]]


def gathered(path, events):
    """The text and finish reason of each choice of a stream."""
    whole = {}
    for event in events:
        if path == GENERATE:
            # Each event holds the whole text so far.
            whole[event.get("index", 0)] = [event["text"], event["meta_info"]["finish_reason"]]
            continue
        for choice in event["choices"]:
            text = choice["delta"].get("content") or "" if path == CHAT else choice["text"]
            said, reason = whole.get(choice["index"], ("", None))
            whole[choice["index"]] = [said + text, choice["finish_reason"] or reason]
    return whole


def same(cluster, request):
    """Sends a request to both, whole and as a stream. Returns the stream's result."""
    path, body = request
    said = ask(cluster.front, "POST", path, body).json()
    right = ask(cluster.serve, "POST", path, body).json()
    assert essence(path, said) == essence(path, right), f"\n{said}\n{right}"
    path, body = streamed(request)
    said = gathered(path, ask(cluster.front, "POST", path, body).events())
    right = gathered(path, ask(cluster.serve, "POST", path, body).events())
    assert said == right and said, f"\n{said}\n{right}"
    return said


# --- checks -------------------------------------------------------------------------------------

def compared(requests):
    """Adds a check for each request."""
    for name, request in requests.items():
        def run(cluster, request=request):
            same(cluster, request)
        run.__name__ = f"{name.replace('-', '_')}_is_what_one_process_says"
        check(run)


def served(process):
    """Requests that a worker has served since it was started."""
    metrics = ask(process, "GET", "/metrics").body.decode()
    return sum(float(value)
               for value in re.findall(r"^vllm:request_success_total\S* (\S+)$", metrics, re.M))


def nothing_is_left(cluster):
    """Waits until no worker has a request."""
    end = time.monotonic() + SECONDS
    for process in cluster.prefill + cluster.decode:
        while ask(process, "GET", "/v1/loads").json()["loads"][0]["num_total_reqs"] > 0:
            assert time.monotonic() < end, f"{process.name} still has requests"
            time.sleep(0.1)


def leave_midway(cluster):
    """A client disconnects while its stream runs."""
    path, body = streamed(chat(max_tokens=4000, ignore_eos=True))
    connection = http.client.HTTPConnection(cluster.front.host, cluster.front.port, timeout=SECONDS)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    connection.getresponse().read(64)
    connection.close()


# --- all of it -----------------------------------------------------------------------------------

def prepare(parser, venv, package):
    """Finds the binary, fetches the model, and installs the router."""
    parser.add_argument("baton", nargs="?", type=pathlib.Path,
                        help="the binary (target/release/baton, else target/debug/baton)")
    parser.add_argument("--model", metavar="PATH", type=pathlib.Path, default=MODEL,
                        help="another model than SmolLM2")
    options = parser.parse_args()
    built = [ROOT / "target" / profile / "baton" for profile in ("release", "debug")]
    options.baton = options.baton or next((path for path in built if path.exists()), None)
    if not options.baton or not options.baton.exists():
        sys.exit(f"{options.baton or 'baton'} is missing: cargo build")
    if options.model == MODEL:
        subprocess.run([ROOT / "tools/quickstart", "--fetch-only"], check=True, stdout=sys.stderr)
    subprocess.run([ROOT / "tools/venv", venv.name, package], check=True, stdout=sys.stderr)
    return options


def run(options, start):
    """Runs all checks in order, on the cluster that `start` makes. Exits."""
    with tempfile.TemporaryDirectory() as folder:
        cluster, failed = Cluster(options.baton, options.model, folder), 0
        try:
            start(cluster)
            for function in CHECKS:
                try:
                    function(cluster)
                    print("ok  ", function.__name__, flush=True)
                except Exception:
                    failed += 1
                    print("FAIL", function.__name__, flush=True)
                    traceback.print_exc()
        finally:
            ended = cluster.end()
    wrong = {name: status for name, status in ended.items()
             if status != 0 and name != cluster.front.name}
    print("FAIL" if wrong else "ok  ", "workers_end_well", wrong or "", flush=True)
    failed += bool(wrong)
    print(f"{len(CHECKS) + 1 - failed} passed, {failed} failed")
    sys.exit(failed > 0)
