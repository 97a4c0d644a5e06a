"""Connectors with timers: Baton's, NIXL's and an empty one, for `tools/vllm-connector --figures`.

vLLM loads them by `kv_connector_module_path`. The folder `BATON_WITNESS` gets lines of JSON. A
line `steps` has the CPU time of all calls so far. A line `alloc` has the time of a load as the
scheduler sees it. The two calls of each layer are empty, and a timer would cost more than they do.

While the folder has the file `wait`, a step waits for the loads that it starts, and a line `load`
has their time. If it has the file `turn`, a step with loads writes `taken` into it, and waits until
the file is gone.
"""
import collections, importlib, json, os, pathlib, time

from baton_kv.vllm import BatonConnector

FOLDER = pathlib.Path(os.environ.get("BATON_WITNESS", "."))
STEPS_PER_LINE = 20
CALLS = [
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc",
    "build_connector_meta", "update_connector_output", "request_finished", "handle_preemptions",
    "bind_connector_metadata", "start_load_kv", "wait_for_save", "get_transfer_results",
    "get_kv_connector_stats", "clear_connector_metadata"]


def note(what, **words):
    with open(FOLDER / "timers.jsonl", "a") as log:
        log.write(json.dumps({"what": what, **words}) + "\n")


def timed(name, function):
    def call(self, *given, **named):
        began, self.depth = time.thread_time_ns(), self.depth + 1
        try:
            return function(self, *given, **named)
        finally:
            self.depth -= 1
            if self.depth == 0:
                self.spent[name] += time.thread_time_ns() - began
            if name in ("build_connector_meta", "clear_connector_metadata"):
                self.count_step()
    return call


class Timers:
    """What both connectors have in common. It stands before the connector among the bases."""

    def __init__(self, vllm_config, role, kv_cache_config):
        self.depth = self.steps = 0
        self.spent, self.began = collections.Counter(), {}
        super().__init__(vllm_config, role, kv_cache_config)

    def count_step(self):
        self.steps += 1
        if self.steps % STEPS_PER_LINE == 0:
            note("steps", role=self.role.name, steps=self.steps, ns=dict(self.spent))

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            self.began[request.request_id] = time.monotonic(), self.steps
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def update_connector_output(self, connector_output):
        super().update_connector_output(connector_output)
        for request_id in connector_output.finished_recving or ():
            began, step = self.began.pop(request_id)
            note("alloc", seconds=time.monotonic() - began, steps=self.steps - step)

    def start_load_kv(self, forward_context, **more):
        loads, turn = self.loads(), FOLDER / "turn"
        if loads and turn.exists():
            turn.write_text("taken")
            while turn.exists():
                time.sleep(0.001)
        began = time.monotonic()
        super().start_load_kv(forward_context, **more)
        if loads and (FOLDER / "wait").exists():
            self.wait(loads)
            note("load", seconds=time.monotonic() - began, count=len(loads))


def with_timers(*bases):
    made = type(f"Timed{bases[-1].__name__}", bases, {})
    for name in CALLS:
        setattr(made, name, timed(name, getattr(made, name)))
    return made


def make_baton():
    class Waiting(Timers):
        def loads(self):
            return self._get_connector_metadata().loads

        def wait(self, loads):
            ids = {one.request_id for one in loads}
            self._wait_for([one for one in self._open.values() if one.request_id in ids], 10)

    return with_timers(Waiting, BatonConnector)


def make_nixl():
    module = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector"
    base = importlib.import_module(module).NixlPullConnector

    class Waiting(Timers):
        def loads(self):
            return list(self._connector_metadata.reqs_to_recv)

        def wait(self, loads):
            worker = self.connector_worker
            for request_id in loads:
                # The handshake of the first request runs beside the steps.
                for handle in worker._recving_transfers.get(request_id, ()):
                    while worker.nixl_wrapper.check_xfer_state(handle) == "PROC":
                        pass

    return with_timers(Waiting, base)


def make_empty():
    """Its calls do nothing, so their time is that of the timers."""
    base = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")

    class EmptyConnector(base.KVConnectorBase_V1):
        def get_num_new_matched_tokens(self, request, num_computed_tokens):
            return 0, False

        def update_state_after_alloc(self, request, blocks, num_external_tokens):
            pass

        def build_connector_meta(self, scheduler_output):
            return base.KVConnectorMetadata()

        def start_load_kv(self, forward_context, **more):
            pass

        def wait_for_layer_load(self, layer_name):
            pass

        def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **more):
            pass

        def wait_for_save(self):
            pass

        def get_transfer_results(self, finished_req_ids):
            return base.KVConnectorTransferResults()

    class Waiting(Timers):
        def loads(self):
            return []

    return with_timers(Waiting, EmptyConnector)


def __getattr__(name):
    makers = {"TimedBatonConnector": make_baton, "TimedNixlConnector": make_nixl,
              "TimedEmptyConnector": make_empty}
    if name not in makers:
        raise AttributeError(name)
    made = globals()[name] = makers[name]()
    return made
