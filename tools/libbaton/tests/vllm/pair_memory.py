"""The library over memory of torch, with the allocator of glibc and with tcmalloc."""
import os, subprocess

from behind import ROOT, check
from pair_servers import MODULES, PYTHON, TESTS


@check
def memory_of_torch_is_handed_over_in_place(pair):
    tcmalloc = subprocess.check_output([ROOT / "tools/tcmalloc"], text=True).strip()
    words = []
    for preloaded in ("", tcmalloc):
        environment = {**os.environ, "PYTHONPATH": str(MODULES), "PYTHONDONTWRITEBYTECODE": "1",
                       "BATON_LIBRARY": str(pair.options.library), "LD_PRELOAD": preloaded}
        done = subprocess.run([PYTHON, TESTS / "torch_memory.py"], env=environment, text=True,
                              capture_output=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        words.append(done.stdout.strip())
    assert words[0].endswith("glibc") and words[1].endswith("tcmalloc"), words
    return ", ".join(words)
