"""A `BatonConnector` that notes checksums of blocks, and can hold the last tokens of a hand-over.

vLLM loads it by `kv_connector_module_path`. The folder `BATON_WITNESS` gets a line for each prompt
that is computed at prefill, and for each load that starts or ends well at decode. While it has the
file `hold`, prefill does not send the last tokens of requests with `hold` in their ids.
"""
import ctypes, json, os, pathlib, zlib
from dataclasses import replace

from baton_kv._vllm_worker import layout_of
from baton_kv.vllm import BatonConnector

FOLDER = pathlib.Path(os.environ.get("BATON_WITNESS", "."))


class WitnessConnector(BatonConnector):
    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.held, self.loads = [], {}

    def checksums(self, blocks):
        layout = layout_of(self._kv_cache_config)
        sums = []
        for block in blocks:
            total = 0
            for layer in range(layout.layers):
                at = layer * layout.layer_stride + block * layout.page_stride
                total = zlib.crc32(
                    ctypes.string_at(self._region.base + at, layout.token_stride), total)
            sums.append(total)
        return sums

    def note(self, what, **words):
        with open(FOLDER / f"{what}.jsonl", "a") as log:
            log.write(json.dumps(words) + "\n")

    def wait_for_save(self):
        saves, is_holding = self._get_connector_metadata().saves, (FOLDER / "hold").exists()
        if not is_holding:
            saves += self.held
            self.held = []
        for number, save in enumerate(saves):
            if is_holding and save.is_complete and "hold" in save.request_id:
                self.held.append(replace(save, digests=None))
                saves[number] = replace(save, is_complete=False)
        super().wait_for_save()
        for save in saves:
            if save.is_complete:
                self.note("computed", room=save.room, sums=self.checksums(save.blocks))

    def _start(self, load, kind):
        self.loads[load.request_id] = load
        one = super()._start(load, kind)
        self.note("started", room=load.room)
        return one

    def _take_end(self, one):
        load = self.loads.pop(one.request_id, None)
        if one.kind == "load" and one.cause is None:
            self.note("loaded", room=load.room, prefix=load.prefix,
                      sums=self.checksums(load.blocks))
        super()._take_end(one)
