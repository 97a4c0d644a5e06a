"""The order of the calls that an engine makes to a connector.

`watch` notes each two successive calls about a request, and the calls of a worker's step. Notes of
real engines are in `recordings`, and the model must make all of these. The folder
`BATON_WITNESS` gets the notes of `RecordedConnector`, which vLLM loads by
`kv_connector_module_path`.
"""

import os
import pathlib

RECORDINGS = pathlib.Path(__file__).parent / "recordings"
STEP = ("handle_preemptions", "bind_connector_metadata", "start_load_kv", "wait_for_save",
        "get_transfer_results", "get_kv_connector_stats", "clear_connector_metadata")


def recordings():
    """The notes of each recording."""
    return {path.stem: set(path.read_text().splitlines())
            for path in sorted(RECORDINGS.glob("*.txt"))}


def compare(name, found, is_recording):
    """Notes that a recording lacks are added to it. Those that all of them lack are an error."""
    notes = recordings()
    if is_recording:
        lines = sorted(notes.get(name, set()) | found)
        (RECORDINGS / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
    else:
        unknown = sorted(found.difference(*notes.values()))
        assert not unknown, f"no recording has (--record adds them to {name}): {unknown}"
    return len(found)


def kind_of(request):
    params = request.kv_transfer_params or {}
    return ("of prefill" if params.get("do_remote_decode") else
            "of decode" if params.get("do_remote_prefill") else "alone")


def watch(connector, note):
    """Calls `note` with each two successive calls about a request, and with each step's calls."""
    config, last, step = connector._kv_transfer_config, {}, []
    role = "prefill" if config.is_kv_producer else "decode"

    def add(request_id, call):
        note(f"{role}: {last.get(request_id, 'nothing')} > {call}")
        last[request_id] = call
        if call.startswith("FINISHED") and call.endswith("freed"):
            # Another request can have this id.
            del last[request_id]

    def wrap(name, before=None, after=None):
        right = getattr(connector, name)

        def call(*given, **named):
            if before:
                before(*given)
            answer = right(*given, **named)
            if after:
                after(answer, *given)
            return answer

        setattr(connector, name, call)

    def asked(answer, request, computed):
        add(request.request_id, f"asked{' with hits' if computed else ''}, "
                                f"{'load' if answer[0] else 'no load'}")

    def allocated(request, blocks, external):
        add(request.request_id, f"allocated, {'load' if external else 'no load'}")

    def scheduled(output):
        for request_id in output.preempted_req_ids or ():
            add(request_id, "preempted")
        for request_id in output.num_scheduled_tokens:
            add(request_id, "scheduled")

    def finished(answer, request, blocks):
        add(request.request_id, f"{request.status.name}, {'kept' if answer[0] else 'freed'}")

    def ended(output):
        failed = getattr(output, "failed_recving", None) or ()
        for request_id in output.finished_sending or ():
            add(request_id, "sent")
        for request_id in output.finished_recving or ():
            add(request_id, "failed" if request_id in failed else "received")

    def in_step(name):
        def before(*_):
            step.append(name)
            if name == STEP[-1]:
                note(f"worker: {', '.join(step)}")
                step.clear()
        return before

    if connector.role.name == "WORKER":
        for name in STEP:
            wrap(name, before=in_step(name))
        return
    wrap("on_new_request", before=lambda one: add(one.request_id, f"new {kind_of(one)}"))
    wrap("get_num_new_matched_tokens", after=asked)
    wrap("update_state_after_alloc", before=allocated)
    wrap("build_connector_meta", before=scheduled)
    wrap("update_connector_output", before=ended)
    wrap("request_finished", after=finished)


def make_recorded():
    from baton_kv.vllm import BatonConnector

    class RecordedConnector(BatonConnector):
        # vLLM looks at the names.
        def __init__(self, vllm_config, role, kv_cache_config):
            super().__init__(vllm_config, role, kv_cache_config)
            self.noted = set()
            watch(self, self.write)

        def write(self, line):
            if line not in self.noted:
                self.noted.add(line)
                with open(pathlib.Path(os.environ["BATON_WITNESS"]) / "calls.txt", "a") as log:
                    log.write(line + "\n")

    return RecordedConnector


def __getattr__(name):
    if name != "RecordedConnector":
        raise AttributeError(name)
    made = globals()[name] = make_recorded()
    return made
