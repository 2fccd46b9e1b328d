"""`spark-submit snapshotter_job.py --config FILE`: the same as `streamfold snapshotter run`.

`streamfold snapshotter pack` puts a copy of this file beside the package, for spark-submit to start.
"""

from __future__ import annotations

import sys

from streamfold.cli.main import main

if __name__ == "__main__":
    main(["snapshotter", "run", *sys.argv[1:]])
