"""Facts and data without torch: axes and derived groups, sharding table, layer graph, layout, plan, model sizes."""
