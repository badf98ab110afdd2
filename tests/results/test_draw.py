"""The image grid of draw.py. Its figures are tested in test_results.py."""
import draw
import numpy as np
from PIL import Image


def test_a_row_of_hybrids_has_the_source_images_and_their_hybrids_of_all_kinds(folder, tmp_path):
    flags = f'--dataset folder --data {folder} --image-size 32 --axis left-right --per-class 2 --batch-size 8'
    draw.save_hybrids(tmp_path / 'x.png', *flags.split())
    grid = np.asarray(Image.open(tmp_path / 'x.png')).astype(float)
    assert grid.shape == (2 * (32 + 2) + 2, (2 + 3) * (32 + 2) + 2, 3), '2 source images and 3 kinds; 2 hybrids'
    first, second, cutmix, mixup, gridmask = (grid[2:34, 2 + 34 * i:34 + 34 * i] for i in range(5))
    assert (cutmix[:, :16] == first[:, :16]).all() and (cutmix[:, 16:] == second[:, 16:]).all()
    assert abs(mixup - (first + second) / 2).max() <= 1 and (first != second).any()
    assert (gridmask[:16] == cutmix[:16]).all() and (gridmask[16:, :16] == second[16:, :16]).all()
