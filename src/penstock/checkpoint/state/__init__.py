"""What is saved: a training's state as a tree and tensors, copied, and put together again."""
