"""A Ray cluster of some nodes on this host, for as long as standard input is open: Ray's own kind for tests.

``python cluster_program.py 4 2 2``: three nodes of so many CPUs. Prints the address, then obeys ``kill N`` and
``add CPUS`` and prints a line when that is done.
"""

from __future__ import annotations

import os
import sys
import tempfile


def main(cpus: list[int]) -> None:
    with tempfile.TemporaryDirectory(prefix="ff-ray-", ignore_cleanup_errors=True) as folder:
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder}
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.mkdir(f"{folder}/ray")
        from ray.cluster_utils import Cluster

        common = {"object_store_memory": 80 << 20}
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": cpus[0],
                "include_dashboard": False,
                "no_monitor": True,
                **common,
            },
        )
        nodes = [cluster.head_node, *(cluster.add_node(num_cpus=count, **common) for count in cpus[1:])]
        print(cluster.address, flush=True)
        for line in sys.stdin:
            word, number = line.split()
            if word == "kill":
                cluster.remove_node(nodes[int(number)], allow_graceful=False)
            else:
                nodes.append(cluster.add_node(num_cpus=int(number), **common))
            print("done", flush=True)


if __name__ == "__main__":
    main([int(one) for one in sys.argv[1:]])
