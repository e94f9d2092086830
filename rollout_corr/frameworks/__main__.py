"""`python -m rollout_corr.frameworks presets` writes the table of docs/presets.md, `losses` those of docs/losses.md."""

import sys

from rollout_corr.frameworks import preset_table, recipe_table

TABLES = {"presets": preset_table.table, "losses": recipe_table.table}

if __name__ == "__main__":
    sys.stdout.write(TABLES[sys.argv[1]]())
