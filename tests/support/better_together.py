"""A board in the files of BetterTogether: a table of stages' times, and logs of its ten best schedules."""

from __future__ import annotations

from pathlib import Path

from tvm_pipeline_papers.better_together import CYCLES_PER_S, read_table, stages_s, ten_best

FRAMES = 5
TABLE = {  # milliseconds of five stages, alone and while all are busy
    "Little": ((9.0, 14.0, 12.0, 8.0, 6.0), (9.5, 15.0, 12.5, 8.5, 6.5)),
    "Big": ((3.0, 6.0, 5.0, 3.5, 2.0), (5.0, 9.0, 7.0, 5.0, 3.0)),
    "GPU": ((4.0, 2.5, 2.2, 5.0, 4.0), (4.4, 2.9, 2.5, 5.5, 4.5)),
}


def write_board(folder: Path, slower: float = 0.8) -> Path:
    """Write a table and ten logs, in which the GPU takes `slower` times what the table says; return the folder."""
    lines = []
    for stage in range(len(TABLE["Big"][0])):
        for occupancy in (0, 1):
            lines += [f"PROCESSOR={name}|COUNT=9|AVG={ms[occupancy][stage]}|CV=0.1" for name, ms in TABLE.items()]
    (folder / "board.raw").write_text("\n".join(lines))
    problem = read_table(folder / "board.raw")
    for number, stages in enumerate(ten_best(problem)):
        taken_s = [
            seconds * (slower if stage.devices[0] == "GPU" else 1.0)
            for stage, seconds in zip(stages, stages_s(problem, stages), strict=True)
        ]
        text, free_s = "", [0.0] * len(stages)
        for frame in range(FRAMES):
            text += f"Task {frame}:\n"
            ready_s = 0.0
            for index, (stage, seconds) in enumerate(zip(stages, taken_s, strict=True)):
                began_s = max(ready_s, free_s[index])
                ready_s = free_s[index] = began_s + seconds
                began, ended = round(began_s * CYCLES_PER_S), round(ready_s * CYCLES_PER_S)
                text += f"  Chunk {index} ({stage.devices[0]}):\n    Start: {began} cycles\n    End: {ended} cycles\n"
            text += f"  Chunk {len(stages)} (Rest):\n    Start: 0 cycles\n    End: 0 cycles\n"
        (folder / f"BM_best_raw_stage_{number + 1}.txt").write_text(text)
    return folder
