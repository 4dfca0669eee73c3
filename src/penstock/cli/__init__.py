"""The command line: `penstock demo`, `calibrate`, `ps`, `trace`."""
