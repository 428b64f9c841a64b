"""Matrix products in numba with a fixed order of additions.

A BLAS rounds differently depending on the number of rows, the threads and the machine. Codes are the signs of this
product; a sign that flips near zero would make a code depend on its batch. Here every element is
((x_0 m_0 + x_1 m_1) + x_2 m_2) + ..., with each step rounded to float32. It takes 1.0-1.7 times as long as OpenBLAS.

A task is ROWS rows. COLUMNS columns of their sums (32 KiB) stay in cache while the matrix is read, four rows at a time,
so that each sum is read and written once per four additions.
"""

# pyright: reportCallIssue=false

import numpy as np
from numpy.typing import NDArray

from hashcore.cpu import threads

ROWS = 16
COLUMNS = 512


def project(x: NDArray[np.float32], matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    """Multiply C-contiguous rows [n, D] by a matrix [D, B]: float32 [n, B]; a row's result does not depend on the
    batch."""
    out = np.zeros((len(x), matrix.shape[1]), np.float32)
    tasks = -(-len(x) // ROWS)
    if tasks:
        workers = threads.count(x.size * matrix.shape[1] // 2)  # 2 additions take as long as a popcount
        threads.run(_project_tasks, tasks, workers, (_readonly(x), _readonly(matrix), out))
    return out


def _readonly(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a read-only view, because numba compiles again for every mix of writeable and read-only arguments."""
    x = x.view()
    x.flags.writeable = False
    return x


def _project_tasks(first, last, x, matrix, out):
    """Add the products of tasks [first, last) to out."""
    n, d = x.shape
    width = matrix.shape[1]
    for task in range(first, last):
        top, bottom = task * ROWS, min(task * ROWS + ROWS, n)
        for left in range(0, width, COLUMNS):
            right = min(left + COLUMNS, width)
            j = 0
            while j + 4 <= d:
                m0, m1 = matrix[j, left:right], matrix[j + 1, left:right]
                m2, m3 = matrix[j + 2, left:right], matrix[j + 3, left:right]
                for row in range(top, bottom):
                    x0, x1, x2, x3 = x[row, j], x[row, j + 1], x[row, j + 2], x[row, j + 3]
                    o = out[row, left:right]
                    for i in range(len(o)):
                        o[i] = (((o[i] + x0 * m0[i]) + x1 * m1[i]) + x2 * m2[i]) + x3 * m3[i]
                j += 4
            while j < d:
                m0 = matrix[j, left:right]
                for row in range(top, bottom):
                    x0 = x[row, j]
                    o = out[row, left:right]
                    for i in range(len(o)):
                        o[i] = o[i] + x0 * m0[i]
                j += 1
    return 0
