"""What is written is a function of what is read: its kernels are made for one such function each."""
