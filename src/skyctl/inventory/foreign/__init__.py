"""Other tools' inventories, as nodes of a cluster.yaml: Ansible (YAML, INI), DeepSpeed, Open MPI, MPICH."""
