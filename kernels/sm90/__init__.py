"""The parts of the Hopper kernels: builds and their table, schedule, producer, transposer, combination, launch."""
