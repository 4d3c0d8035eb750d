"""The parts of the harness: how a Model/ModelNew pair is found, judged, timed, held against the machine's limits, and recorded.

    pairs        finds pairs by file stem and loads them by path
    guard        what a candidate must leave alone: clocks, comparisons, PyTorch's switches
    machine      the device: memory, precision switches, clocks, versions
    observe      what a module gives, by name
    compare      how far two answers are apart: the two gates
    correctness  the hygiene around the gates
    timing       interleaved rounds, medians, confidence intervals
    roof         bytes and FLOPs of a pair, ceilings of the machine, the floor they set
    trial        one pair from import to record
    distributed  the same on several GPUs, or processes, at once
    watch        outlives a candidate that ends the process
    record       the JSON file
    report       the table and the chart

Nothing here knows any pair by name.
"""
