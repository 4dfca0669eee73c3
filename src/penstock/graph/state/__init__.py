"""What lives longer than a run: variables, queues, mutexes, positions of readers, counts of draws; and their saving."""
