"""Between hosts: one authenticated connection a node, over TCP. No torch, no pickle."""
