"""The numbers that a script reads from the GPU, although no kernel has computed them."""
