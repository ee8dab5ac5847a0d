"""Start the script in processes with simulated GPUs, as one rank or as several."""
