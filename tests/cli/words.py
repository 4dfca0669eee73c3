"""What each concept is not called: the words that no command and no JSON document uses."""

from __future__ import annotations

#: What another word stands for in every command.
OTHER_WORDS = {
    "--batch": "--batch-size",
    "--nodes": "--ranks",
    "--clients": "--ranks",
    "--seeds": "--repeats",
    "--repeat": "--repeats",
    "--runs": "--repeats",
    "--schemes": "--policies",
    "--methods": "--encodings",
    "--ram": "--memory",
    "--cache": "--memory",
    "--ssd": "--local-disk or --drive",
    "--step": "--step-seconds for a time",
    "--stream": "--recording",
    "--string": "--recording",
    "--against": "the positional TRACE",
    "--force": "--overwrite",
    "--replace": "--overwrite",
    "--headroom": "a name that ends in -share",
}

#: And in every JSON document: of a job, of results, of times and shares.
OTHER_WORDS_OF_JSON = {
    *(
        "batch_per_rank", "clients", "seeds", "schemes", "methods", "headroom", "waited", "waited_seconds",
        "run_time",
    ),
    *(
        "hit_rate", "hit_ratio", "bound_hit_ratio", "ssd_bytes", "ram_bytes", "string", "recorder",
        "points", "runs", "rows", "curves", "panels",
    ),
}  # fmt: skip

#: And no argument or field of what the reference documents.
OTHER_WORDS_OF_PYTHON = {
    *(
        "batch_per_rank", "headroom", "hit_rate", "hit_ratio", "recorder", "repeat", "replace", "run_time",
    ),
    *("say", "schemes", "telling", "waited", "waited_seconds", "ram_bytes", "ssd_bytes", "is_whole"),
}  # fmt: skip
