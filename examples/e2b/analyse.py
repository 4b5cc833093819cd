"""A table goes in, a fit and a picture come out."""

import base64
import sys

from e2b_code_interpreter import Sandbox

TABLE = "hour,visitors\n" + "\n".join(f"{hour},{3 * hour + hour % 2}" for hour in range(12))

with Sandbox.create() as sandbox:
    sandbox.files.write("/home/user/visitors.csv", TABLE)
    execution = sandbox.run_code(
        """
import matplotlib.pyplot as plt, numpy as np, pandas as pd
table = pd.read_csv("visitors.csv")
slope, offset = np.polyfit(table.hour, table.visitors, 1)
plt.scatter(table.hour, table.visitors)
plt.title("Visitors")
plt.show()
round(float(slope), 1)
""",
        on_stdout=lambda message: print(message.line, end="", file=sys.stderr),
    )
    if execution.error:
        sys.exit(execution.error.traceback)
    picture = next(result for result in execution.results if result.png)
    with open(sys.argv[1] if len(sys.argv) > 1 else "visitors.png", "wb") as file:
        file.write(base64.b64decode(picture.png))
    print("slope", execution.text, "chart", picture.chart.type.value)
