"""What the ranks of a job do together: they exchange messages, agree, and share the tensors of a state."""
