// Asks a GPU what the design of the CUDA backend depends on. Each section is a process of its own:
//   gpu-probe SECTION           rows of a table in Markdown
//   gpu-probe primitives FILE   single instructions, bit by bit
#include "primitives.cuh"
#include "processes.cuh"

int main(int count, char **words) {
    std::string section = count > 1 ? words[1] : "";
    int cards = 0;
    if (cudaGetDeviceCount(&cards) != cudaSuccess || cards == 0) {
        fprintf(stderr, "gpu-probe: this machine has no GPU that CUDA can use\n");
        return 3;
    }
    setvbuf(stdout, nullptr, _IOLBF, 0);
    if (section == "exporter" && count > 3) return run_exporter(words[2], atoi(words[3]));
    if (section == "primitives" && count > 2) {
        FILE *file = fopen(words[2], "w");
        return file ? print_primitives(file) | fclose(file) : 1;
    }
    if (section == "card") probe_card();
    else if (section == "ceilings") probe_ceilings();
    else if (section == "word") probe_word();
    else if (section == "products") probe_products();
    else if (section == "pages") probe_pages();
    else if (section == "tiles") probe_tiles();
    else if (section == "processes") probe_processes();
    else if (section == "read-only") return run_read_only();
    else if (section == "death-ipc") {
        Destination to;
        probe_death("ipc", to);
    } else if (section == "death-vmm") {
        Destination to;
        probe_death("vmm", to);
    } else if (section == "dmabuf") probe_dmabuf();
    else {
        fprintf(stderr, "gpu-probe: unknown section '%s'\n", section.c_str());
        return 2;
    }
    return 0;
}
