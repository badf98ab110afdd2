"""draw.py: the picture of hybrids. Its figures of tables are tested with the tables."""
import draw
import numpy as np
from PIL import Image


def test_a_row_of_hybrids_has_the_parents_and_their_hybrids_of_all_kinds(folder, tmp_path):
    flags = f'--dataset folder --data {folder} --image-size 32 --axis left-right --per-class 2 --batch-size 8'
    draw.draw_hybrids(tmp_path / 'x.png', *flags.split())
    picture = np.asarray(Image.open(tmp_path / 'x.png')).astype(float)
    assert picture.shape == (2 * (32 + 2) + 2, (2 + 3) * (32 + 2) + 2, 3), '2 parents and 3 kinds; 2 hybrids'
    first, second, cutmix, mixup, gridmask = (picture[2:34, 2 + 34 * i:34 + 34 * i] for i in range(5))
    assert (cutmix[:, :16] == first[:, :16]).all() and (cutmix[:, 16:] == second[:, 16:]).all()
    assert abs(mixup - (first + second) / 2).max() <= 1 and (first != second).any()
    assert (gridmask[:16] == cutmix[:16]).all() and (gridmask[16:, :16] == second[16:, :16]).all()
