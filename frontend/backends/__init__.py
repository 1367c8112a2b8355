"""Where gens run. The contract is in ``base``; each other module is one backend."""
