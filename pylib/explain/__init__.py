"""One page that explains a kernel: every stage from Python to machine code, side by side and linked, and pictures.

    page = lowbit.compile(spec, "sm_90a").explain(m=16)   # a notebook shows it
    page.save("page.html")                                # one file, without network access

The page is made by compiling the kernel once more and noting where every line came from (`passes.origins`); one cluster
of it runs in the emulator. Pictures hold values of the compiler, the assembler and the emulator, never copies of them:

| file | what it draws |
|---|---|
| `text.py` | stages as lines with links |
| `packing.py` | which bits of which word hold which code |
| `layouts.py` | tiles as grids of lanes and registers |
| `machine.py` | registers, occupancy, waves, roofline |
| `measured.py` | the time of a call, where the target is this machine's GPU |
| `executed.py`, `activity.py` | what ran: counts, banks and conflicts, copies in flight |
| `shared.py` | buffers of shared memory by name, and the copy pipeline as rounds |
| `page.py`, `templates/` | the page |
| `pictures.py` | pictures for docs/ |
| `trace.py` | a launch in the emulator for Perfetto and Chrome |
"""
