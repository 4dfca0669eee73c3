"""What the ranks of a job do together: they exchange messages and agree.

`Ranks` is where to begin: `ranks_of_this_job` makes those of torch.distributed or MPI, `alone` this process by itself.

    exchange           what every rank contributes, what rank 0 decides, what all hear
    agreement          after which step all ranks stop
    mesh               which data-parallel rank a process is
    transport          the seam: who carries messages; `_torch` and `_mpi` do, `_of_job` chooses
    carrier            the seam for samples: `_zmq` and `_mpi`, see `remote_peers.Carrier`; `wakeable` ends their waits
"""

from penstock.ranks.exchange import Ranks, alone, ranks_of_this_job, shared_ranks
from penstock.ranks.mesh import place_in_mesh
from penstock.ranks.transport import named_ranks

__all__ = ["Ranks", "alone", "named_ranks", "place_in_mesh", "ranks_of_this_job", "shared_ranks"]
